"""How far the data lags behind the policy: measured, and acted on in intake.py and guard.py."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deltawire_trainer.losses.terms import k3
from deltawire_trainer.samples import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpread:
    """Ages of a batch against the live version, by the oldest token of each sample."""

    mean: float
    largest: int
    within_sample: float
    """Mean over samples of newest minus oldest version."""
    within_batch: int
    """Newest minus oldest version of any token."""
    histogram: dict[int, int]
    """Staleness -> samples."""


def version_spread(samples: Sequence[TrainingSample], *, live_version: int) -> VersionSpread:
    """Measure a batch. Raises ValueError for an empty one."""
    if not samples:
        raise ValueError("the spread of no samples is not defined")
    ages = [live_version - sample.oldest_version for sample in samples]
    oldest = min(sample.oldest_version for sample in samples)
    newest = max(int(sample.versions.max()) for sample in samples)
    inner = [int(s.versions.max()) - s.oldest_version for s in samples]
    return VersionSpread(
        mean=sum(ages) / len(ages),
        largest=max(ages),
        within_sample=sum(inner) / len(inner),
        within_batch=newest - oldest,
        histogram=dict(sorted(Counter(ages).items())),
    )


def effective_sample_size(log_ratio: torch.Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of the token weights w = exp(log_ratio), in (0, 1]; 1 on-policy.

    Kish 1965; [T] log ratios policy - behaviour. Shifted by the largest, so nothing overflows.
    """
    if not log_ratio.numel():
        return 1.0
    weights = (log_ratio.double() - log_ratio.max()).exp()
    return float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum()))


def mismatch_kl(log_ratio: torch.Tensor, same_version: torch.Tensor) -> float:
    """KL(behaviour || policy) in nats per token over tokens sampled by the very same weights.

    What remains is the difference between two engines. 0 when no token qualifies.
    """
    x = log_ratio[same_version].double()
    return float(k3(x).mean()) if x.numel() else 0.0
