"""Credit inside an episode: what its turns or tokens earned apart reaches the tokens before.

A score falls on a unit of the sequence, a turn or a sampled token. A unit's advantage compares
what its rollout still earned from it on with what the others of the group still earned from the
same unit on:

    R[i, j] = sum of scores of rollout i from unit j on
    A[i, t] = A[i] + credit_weight * baseline(R[., j])[i]     for every token t of unit j

with A[i] and the baseline those of the algorithm (advantages.py). Rewards to go of scored steps:
process supervision of GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.3; their sum with the
episode's advantage: turn-level credit, arXiv 2505.11821. A baseline for each unit depends on
nothing the policy did in it, so it adds no bias; a unit that one rollout alone reached has none.
Pure functions.
"""

from collections.abc import Iterator
from collections.abc import Sequence as PySequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deltawire.protocol.rollouts import Rollout, Sequence
from deltawire_trainer.advantages import Rewards, advantages_of

Credit = Literal["episode", "turn", "token"]
"""Which scores count beside the episode's reward: none, `Turn.reward`, or `token_rewards`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The scored units of one sequence.

    Example: two turns of two tokens each, scored 1 and 0: scores ``[1 0]``, of_token
    ``[0 0 1 1]``, to_go ``[1 0]``.
    """

    scores: Rewards
    """[units]"""
    of_token: NDArray[np.int64]
    """[tokens] unit of each trained token; -1 outside of all."""

    @property
    def to_go(self) -> Rewards:
        """[units] sum of the scores from each unit on."""
        found: Rewards = np.cumsum(self.scores[::-1])[::-1]
        return found


def units_of(sequence: Sequence, trained: NDArray[np.int64], credit: Credit) -> Units:
    """The units of a sequence whose trained tokens stand at these positions.

    A unit without a score has 0, so that rollouts with and without one can be compared.
    """
    if credit == "token":
        told = np.asarray(sequence.token_rewards or [0.0] * len(sequence.token_ids))
        return Units(scores=told[trained], of_token=np.arange(len(trained)))
    turns = sequence.turns if credit == "turn" else []
    of_token = np.full(len(trained), -1, dtype=np.int64)
    for number, turn in enumerate(turns):
        of_token[(trained >= turn.start) & (trained < turn.end)] = number
    scores = np.array([turn.reward or 0.0 for turn in turns], dtype=np.float64)
    return Units(scores=scores, of_token=of_token)


def token_advantages(
    groups: PySequence[PySequence[Units]], *, algorithm: str, group_size: int
) -> list[list[Rewards]]:
    """[tokens] advantages of each sequence of each group, by its units alone."""
    columns: list[Rewards] = []
    for members in groups:
        to_go = [member.to_go for member in members]
        longest = max((len(values) for values in to_go), default=0)
        columns += [
            np.array([values[unit] for values in to_go if unit < len(values)])
            for unit in range(longest)
        ]
    weighed = iter(advantages_of(columns, algorithm=algorithm, group_size=group_size))
    return [_scattered(members, weighed) for members in groups]


def scores_of(rollout: Rollout, credit: Credit) -> tuple[float, ...]:
    """All scores of a rollout in order, to tell whether two rollouts earned the same way."""
    if credit == "token":
        return tuple(score for s in rollout.sequences for score in s.token_rewards or ())
    if credit == "turn":
        return tuple(turn.reward or 0.0 for s in rollout.sequences for turn in s.turns)
    return ()


def _scattered(members: PySequence[Units], weighed: Iterator[Rewards]) -> list[Rewards]:
    """Columns of a group, unit after unit -> [tokens] for each member."""
    by_unit: list[list[float]] = [[] for _ in members]
    longest = max((len(member.scores) for member in members), default=0)
    for unit in range(longest):
        reached = [number for number, member in enumerate(members) if unit < len(member.scores)]
        for number, value in zip(reached, next(weighed), strict=True):
            by_unit[number].append(float(value))
    return [
        np.array([*values, 0.0])[member.of_token]  # unit -1, outside of all, is the last: 0
        for values, member in zip(by_unit, members, strict=True)
    ]
