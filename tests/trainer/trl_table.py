"""Writes tests/golden/trl_losses.json: loss values computed by TRL's own code on fixed numbers.

    python tests/trainer/trl_table.py PATH_TO_SITE_PACKAGES_WITH_TRL > tests/golden/trl_losses.json

TRL's `_compute_loss` methods are taken out of their files and run with a stand-in for the trainer
around them, so that neither a model nor TRL's dependencies are needed. Made with trl 1.16.0.
"""

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LENGTHS = [3, 1, 5, 2]
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_TOKENS = 6
BETA = 0.05


def numbers() -> dict[str, torch.Tensor]:
    """[B, T] logprobs on both sides of the clip range, [B] advantages, [B, T] mask."""
    generator = torch.Generator().manual_seed(7)
    shape = (len(LENGTHS), max(LENGTHS))
    policy = -torch.rand(shape, generator=generator, dtype=torch.float64) * 2
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[float(t < n) for t in range(shape[1])] for n in LENGTHS])
    return {
        "policy": policy,
        "old": policy + 0.4 * noise,
        "reference": policy + 0.3 * noise.flip(1),
        "advantages": torch.tensor([1.2, -0.8, 0.5, -1.5], dtype=torch.float64),
        "mask": mask.double(),
    }


def method(path: Path) -> Any:
    """The function `_compute_loss` of a trainer file, on its own."""
    tree = ast.parse(path.read_text())
    found = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"
    )
    module = ast.Module(body=[found], type_ignores=[])
    scope: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(module, str(path), "exec"), scope)
    return scope["_compute_loss"]


def stand_in(data: dict[str, torch.Tensor], **options: Any) -> SimpleNamespace:
    """What the method asks of the trainer around it."""
    same = lambda tensor, **_: tensor  # noqa: E731
    accelerator = SimpleNamespace(
        num_processes=1, gather=same, reduce=same, gather_for_metrics=same, sync_gradients=True
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            data["policy"],
            torch.zeros_like(data["policy"]),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        use_vllm=False,
        epsilon_low=CLIP_LOW,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _metrics=defaultdict(lambda: defaultdict(list)),
        **options,
    )


def table(site: Path) -> dict[str, float]:
    """Our name of each algorithm -> TRL's loss."""
    data = numbers()
    empty = torch.zeros((len(LENGTHS), 0))
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": data["mask"],
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["reference"],
        "num_items_in_batch": data["mask"].sum(),
        "old_logps": (data["old"] * data["mask"]).sum(1),
    }
    grpo = method(site / "trl/trainer/grpo_trainer.py")
    rloo = method(site / "trl/trainer/rloo_trainer.py")
    found = {}
    for name, loss_type, level, high, beta in (
        ("grpo", "grpo", "token", CLIP_HIGH, 0.0),
        ("grpo+kl", "grpo", "token", CLIP_HIGH, BETA),
        ("dr_grpo", "dr_grpo", "token", CLIP_HIGH, 0.0),
        ("dapo", "dapo", "token", CLIP_HIGH, 0.0),
        ("gspo", "grpo", "sequence", CLIP_HIGH, 0.0),
        # TRL's cap of CISPO is the ratio itself, ours its distance from 1.
        ("cispo", "cispo", "token", 1.0 + CLIP_HIGH, 0.0),
    ):
        trainer = stand_in(
            data,
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_high=high,
            beta=beta,
        )
        found[name] = float(grpo(trainer, None, dict(inputs)))
    trainer = stand_in(data, epsilon_high=CLIP_HIGH, beta=0.0)
    found["rloo"] = float(rloo(trainer, None, dict(inputs)))
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(table(Path(sys.argv[1])), indent=1) + "\n")
