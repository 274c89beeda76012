"""AdamW over the masters, and the learning rate of each step."""

import math

import torch

from deltawire.job.spec import TrainSpec
from deltawire_trainer.policy import Policy


def build_optimizer(policy: Policy, spec: TrainSpec) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    masters = [p for p in policy.masters.values() if p.requires_grad]
    matrices = [p for p in masters if p.dim() >= 2]
    vectors = [p for p in masters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,
    )


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Rises linearly over `warmup_steps` (Adam's first steps move most), then follows the schedule to
    0 at `steps`. ``warmup_steps=2, constant``: lr/2 at step 0, lr from step 1 on.
    """
    warm = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    if spec.schedule == "constant":
        return spec.lr * warm
    span = max(1, spec.steps - spec.warmup_steps)
    done = min(1.0, max(0, step - spec.warmup_steps) / span)
    shape = 1.0 - done if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.lr * warm * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use a rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr
