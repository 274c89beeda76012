"""What every loss takes and gives: token values laid end to end, T tokens of S samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """One micro-batch, as a loss sees it."""

    policy_logprobs: torch.Tensor
    """[T] of the target policy, with gradient."""
    old_logprobs: torch.Tensor
    """[T] what the ratio is taken against (see correction.py), no gradient."""
    advantages: torch.Tensor
    """[T]"""
    sample_index: torch.Tensor
    """[T] int64, non-decreasing."""
    samples: int
    clip_low: float
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The policy loss of each token, before weights and reduction."""

    values: torch.Tensor
    """[T] with gradient."""
    clipped_low: torch.Tensor
    """[T] bool, where the lower clip stops the gradient."""
    clipped_high: torch.Tensor
    """[T] bool, where the upper clip stops the gradient."""


Loss = Callable[[LossInput], TokenLoss]
"""A loss is a pure function."""


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x with x = log(q / p) on tokens drawn from p: estimates KL(p || q), never
    negative (Schulman 2020, "Approximating KL Divergence"; GRPO, arXiv 2402.03300, eq. 4)."""
    return log_ratio.exp() - 1.0 - log_ratio


def clipped_surrogate(ratio: torch.Tensor, batch: LossInput) -> TokenLoss:
    """-min(ratio * A, clip(ratio) * A) per token: PPO, arXiv 1707.06347."""
    advantages = batch.advantages
    bounded = ratio.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high)
    return TokenLoss(
        values=-torch.minimum(ratio * advantages, bounded * advantages),
        clipped_low=(ratio < 1.0 - batch.clip_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + batch.clip_high) & (advantages > 0),
    )
