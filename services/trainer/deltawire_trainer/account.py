"""The record of a step: what the batch was, for people and for /status."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from deltawire.protocol.control import StepRecord
from deltawire.protocol.rollouts import Rollout
from deltawire.protocol.versions import PolicyVersion
from deltawire_trainer.errors_seen import ErrorTally
from deltawire_trainer.learner import Gradient, Update
from deltawire_trainer.samples import TrainingSample
from deltawire_trainer.staleness import version_spread

_SIGNAL = 1e-6
"""Advantages below this are what rounding leaves of equal rewards."""


def step_record(
    *,
    step: int,
    version: int,
    live_version: int,
    groups: int,
    rollouts: Sequence[Rollout],
    samples: Sequence[TrainingSample],
    gradient: Gradient,
    update: Update,
    errors: ErrorTally,
    wait_s: float,
    finished_at: float,
) -> StepRecord:
    """Everything known of a step before its version is on the way."""
    spread = version_spread(samples, live_version=live_version)
    rewards = [rollout.reward for rollout in rollouts]
    return StepRecord(
        step=step,
        version=PolicyVersion(version),
        reward=fmean(rewards),
        reward_std=pstdev(rewards),
        staleness=spread.mean,
        staleness_max=spread.largest,
        groups=groups,
        rollouts=len(rollouts),
        tokens=sum(len(sample.trained) for sample in samples),
        loss=gradient.loss,
        grad_norm=update.grad_norm,
        lr=update.lr,
        ess=gradient.ess,
        mismatch_kl=gradient.mismatch_kl,
        metrics={
            **gradient.metrics,
            **rollout_metrics(rollouts),
            **distinct_facts(rollouts),
            "applied": float(update.applied),
            "spread_in_sample": spread.within_sample,
            "spread_in_batch": float(spread.within_batch),
            **{f"staleness_{age}": float(n) for age, n in spread.histogram.items()},
        },
        phases_s={
            "wait": wait_s,
            "forward_backward": gradient.forward_backward_s,
            "optimizer": update.optimizer_s,
        },
        finished_at=finished_at,
        errors=errors.total,
        error_reason=errors.reason,
        groups_with_signal=groups_with_signal(samples),
    )


def groups_with_signal(samples: Sequence[TrainingSample]) -> int:
    """Groups that a policy gradient can learn from: some token has an advantage."""
    return len({s.group_id for s in samples if abs(s.advantages).max() > _SIGNAL})


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of the reward's parts and of what the environment measured, by name."""
    parts = _means(rollout.reward_parts for rollout in rollouts)
    means = {**parts, **_means(rollout.metrics for rollout in rollouts)}
    means["truncated"] = fmean(float(r.status == "truncated") for r in rollouts)
    return means


def _means(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Mean of each name over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if math.isfinite(value):
                columns.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in columns.items()}


def distinct_facts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many different values each fact has: `distinct_words` tells a collapse from learning.

    Counts the strings under each name of `info`, single or in lists, and the completions.
    """
    seen: dict[str, set[str]] = {}
    for rollout in rollouts:
        for name, fact in rollout.info.items():
            texts = fact if isinstance(fact, list) else [fact]
            seen.setdefault(name, set()).update(t for t in texts if isinstance(t, str))
    counts = {f"distinct_{name}": float(len(texts)) for name, texts in seen.items() if texts}
    completions = {
        tuple(t for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m)
        for rollout in rollouts
        for s in rollout.sequences
    }
    return {**counts, "distinct_completions": float(len(completions))}
