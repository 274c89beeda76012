"""Token losses -> one number. Each reduction divides by totals of the whole step, so that the sum
over micro-batches equals the loss of the undivided batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deltawire_trainer.ragged import per_sample_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over all samples of the optimizer step, also those without an advantage."""

    samples: int
    tokens: int
    max_tokens: int
    """Most tokens that one sample may train: the constant of Dr. GRPO."""


Reduction = Callable[[torch.Tensor, torch.Tensor, int, Totals], torch.Tensor]
"""([T] values, [T] sample_index, S, totals) -> scalar share of the step's loss."""


def per_sequence(
    values: torch.Tensor, sample_index: torch.Tensor, samples: int, totals: Totals
) -> torch.Tensor:
    """Mean over each sequence, then over sequences (GRPO)."""
    return per_sample_mean(values, sample_index, samples).sum() / totals.samples


def per_token(
    values: torch.Tensor, sample_index: torch.Tensor, samples: int, totals: Totals
) -> torch.Tensor:
    """Mean over all tokens of the step (DAPO)."""
    return values.sum() / max(1, totals.tokens)


def per_slot(
    values: torch.Tensor, sample_index: torch.Tensor, samples: int, totals: Totals
) -> torch.Tensor:
    """Sum over tokens by a constant length, so that length carries no bias (Dr. GRPO)."""
    return values.sum() / (totals.samples * totals.max_tokens)
