"""One run of TRL's synchronous GRPOTrainer on a job: tasks, rewards, optimizer, rates and loss are
those that our trainer uses; sampling and training are TRL's own.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.learning.curve import Curve
from bench.learning.task import opening, reward_of
from deltawire.job.resolve import ResolvedJob
from deltawire.job.spec import JobSpec
from deltawire_trainer.base_model import resolve_base_model
from deltawire_trainer.optimizer import learning_rate


def learn(resolved: ResolvedJob, *, way: str, scratch: Path) -> Curve:
    """Train to the end."""
    rewards: list[float] = []
    finished_at: list[float] = []
    trainer = make_trainer(resolved, rewards, scratch)
    trainer.add_callback(_Clock(finished_at))
    trainer.train()
    return Curve(
        way=way,
        seed=resolved.spec.train.seed,
        rewards=rewards,
        seconds=finished_at[-1] - finished_at[0],
    )


class _Clock(TrainerCallback):
    """Notes when each step was done."""

    def __init__(self, finished_at: list[float]) -> None:
        self._finished_at = finished_at

    def on_step_end(self, *_: object, **__: object) -> None:
        self._finished_at.append(time.monotonic())


def make_trainer(resolved: ResolvedJob, rewards: list[float], scratch: Path) -> GRPOTrainer:
    """TRL's trainer for a job; `rewards` receives the mean of every step."""
    spec = resolved.spec
    torch.manual_seed(spec.train.seed)
    folder = resolve_base_model(spec.model.source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def earned(completions: list[Any], number: list[int], **_: object) -> list[float]:
        said = [messages[0]["content"] for messages in completions]
        scores = [
            asyncio.run(reward_of(resolved, n, text)) for n, text in zip(number, said, strict=True)
        ]
        rewards.append(sum(scores) / len(scores))
        return scores

    return GRPOTrainer(
        model=model,
        reward_funcs=earned,
        args=configuration(spec, scratch),
        train_dataset=_tasks(resolved),
        processing_class=AutoTokenizer.from_pretrained(folder),
        optimizers=_optimizers(model, spec),
    )


def configuration(spec: JobSpec, scratch: Path) -> GRPOConfig:
    """TRL's names for our settings: one batch of fresh samples, one update, GRPO's own loss."""
    train = spec.train
    return GRPOConfig(
        output_dir=str(scratch),
        seed=train.seed,
        use_cpu=True,
        bf16=train.autocast,
        max_steps=train.steps,
        per_device_train_batch_size=train.groups_per_step * train.group_size,
        gradient_accumulation_steps=1,
        num_generations=train.group_size,
        num_iterations=1,
        max_completion_length=spec.sampling.max_new_tokens,
        temperature=spec.sampling.temperature,
        loss_type="grpo",
        scale_rewards="group",
        beta=train.kl_coef,
        epsilon=train.clip_low,
        epsilon_high=train.clip_high,
        max_grad_norm=train.max_grad_norm,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _optimizers(
    model: torch.nn.Module, spec: JobSpec
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Our trainer's AdamW and its rate of each step."""
    train = spec.train
    assert train.weight_decay == 0.0, "parameter groups would have to be told apart"
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=0.0,
        fused=True,
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(train, step) / train.lr
    )
    return optimizer, rate


def _tasks(resolved: ResolvedJob) -> Dataset:
    """The tasks of the run's tickets, in their order."""
    train = resolved.spec.train
    numbers = list(range(train.steps * train.groups_per_step))
    prompts = [asyncio.run(opening(resolved, number)) for number in numbers]
    return Dataset.from_dict({"prompt": prompts, "number": numbers})
