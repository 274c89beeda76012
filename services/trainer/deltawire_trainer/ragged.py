"""Sums and means over the tokens of each sample, for token values laid end to end."""

import torch


def per_sample_sum(values: torch.Tensor, sample_index: torch.Tensor, samples: int) -> torch.Tensor:
    """[T] values of S samples -> [S] sums. Differentiable."""
    return values.new_zeros(samples).index_add(0, sample_index, values)


def per_sample_mean(values: torch.Tensor, sample_index: torch.Tensor, samples: int) -> torch.Tensor:
    """[T] values of S samples -> [S] means; 0 for a sample without tokens."""
    counts = torch.bincount(sample_index, minlength=samples).clamp(min=1)
    return per_sample_sum(values, sample_index, samples) / counts
