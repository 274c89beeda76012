"""TRL's real GRPOTrainer with our callback: a follower holds what was trained, in every bit."""

from pathlib import Path

import pytest
import torch
from bench.learning.tiny_model import write_tiny_model
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import deltawire
from deltawire.integrations.trl import PublishWeights
from deltawire.protocol.errors import Fenced

# TRL hands transformers an option that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

STEPS = 3


def trainer_of(folder: Path, callback: PublishWeights, *, saves: str = "no") -> GRPOTrainer:
    """Two groups of two short completions a step; vowels are paid for."""
    model = write_tiny_model(folder / "model")
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [
            float(sum(map(text.count, "aeiou"))) + len(text) % 5 for text in completions
        ],
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            learning_rate=1e-2,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=6,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy=saves,
            save_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["vowels: "] * 2 * STEPS}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[callback],
    )


@pytest.mark.parametrize(("every", "versions"), [(1, 3), (2, 2), (8, 1)])
def test_a_follower_of_a_grpo_training_holds_its_weights_in_every_bit(
    tmp_path: Path, every: int, versions: int
) -> None:
    store = f"file://{tmp_path}/bucket"
    trainer = trainer_of(tmp_path, PublishWeights(store, run_id="r", every=every))

    trainer.train()

    follower = deltawire.follow(store, run_id="r", cache_dir=tmp_path / "cache")
    replica = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    untrained = replica.lm_head.weight.clone()
    assert follower.apply_to(replica) == versions
    assert not torch.equal(replica.lm_head.weight, untrained)
    for (name, ours), theirs in zip(
        replica.named_parameters(), trainer.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs.to(torch.bfloat16)), name


def test_a_training_that_was_taken_over_stops(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/bucket"

    class TakeOver(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):  # type: ignore[no-untyped-def]
            if state.global_step == 1:
                deltawire.publish(trainer.model, store=store, run_id="r", take_over=True).close()

    with PublishWeights(store, run_id="r") as publishing:
        trainer = trainer_of(tmp_path, publishing)
        trainer.add_callback(TakeOver())
        with pytest.raises(Fenced):
            trainer.train()


def test_a_training_that_died_goes_on_with_its_run(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/bucket"

    class Die(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):  # type: ignore[no-untyped-def]
            if state.global_step == 2:
                raise ConnectionResetError

    with PublishWeights(store, run_id="r") as publishing, pytest.raises(ConnectionResetError):
        trainer = trainer_of(tmp_path, publishing, saves="steps")
        trainer.add_callback(Die())
        trainer.train()
    again = trainer_of(tmp_path, PublishWeights(store, run_id="r"), saves="steps")
    again.train(resume_from_checkpoint=True)

    follower = deltawire.follow(store, run_id="r", cache_dir=tmp_path / "cache")
    replica = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert follower.apply_to(replica) == STEPS
    assert torch.equal(replica.lm_head.weight, again.model.lm_head.weight.to(torch.bfloat16))


def test_before_training_there_is_no_publisher() -> None:
    with pytest.raises(RuntimeError, match="began"):
        PublishWeights("file:///nowhere").publisher  # noqa: B018
