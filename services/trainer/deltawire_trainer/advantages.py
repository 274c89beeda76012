"""Rewards of a group -> advantages. Pure functions over [k] rewards, one per algorithm's baseline.

A group may come home incomplete: k of G rollouts. A baseline that contains the rollout itself
shrinks every advantage by (k-1)/k, so a small group would weigh less than a whole one;
`whole_group_scale` takes that bias out.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
"""[k] rewards of the usable rollouts of one group."""

STD_EPS = 1e-4
"""Keeps the division finite when all rewards of a group are nearly equal."""


def group_normalised(rewards: Rewards) -> Rewards:
    """(r - mean) / (std + eps), std with k-1: GRPO, DeepSeekMath, arXiv 2402.03300."""
    return group_centred(rewards) / (_spread(rewards) + STD_EPS)


def group_centred(rewards: Rewards) -> Rewards:
    """r - mean, no division by the deviation: Dr. GRPO, arXiv 2503.20783."""
    centred: Rewards = rewards - rewards.mean()
    return centred


def leave_one_out(rewards: Rewards) -> Rewards:
    """r - mean of the others: RLOO, arXiv 2402.14740. Unbiased for any k >= 2."""
    k = len(rewards)
    return group_centred(rewards) * (k / (k - 1)) if k > 1 else np.zeros_like(rewards)


def batch_normalised(groups: Sequence[Rewards]) -> list[Rewards]:
    """(r - batch mean) / batch std: REINFORCE++, arXiv 2501.03262."""
    everything = np.concatenate(list(groups))
    return [(g - everything.mean()) / (_spread(everything) + STD_EPS) for g in groups]


def whole_group_scale(k: int, group_size: int) -> float:
    """What a centred advantage of k of G rollouts is multiplied by to weigh like a whole group's.

    ``whole_group_scale(8, 8) == 1.0``; ``whole_group_scale(2, 8) == 1.75``.
    """
    if k < 2 or group_size < 2:
        return 1.0
    return (k / (k - 1)) * ((group_size - 1) / group_size)


def advantages_of(groups: Sequence[Rewards], *, algorithm: str, group_size: int) -> list[Rewards]:
    """Advantages of each rollout of each group, as the algorithm defines its baseline."""
    if algorithm == "reinforce_pp":
        return batch_normalised(groups)
    if algorithm == "rloo":
        return [leave_one_out(rewards) for rewards in groups]
    baseline = _BASELINES.get(algorithm, group_normalised)
    return [baseline(r) * whole_group_scale(len(r), group_size) for r in groups]


_BASELINES: dict[str, Callable[[Rewards], Rewards]] = {"dr_grpo": group_centred}


def _spread(rewards: Rewards) -> float:
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
