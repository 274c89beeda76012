"""Training samples: token sequences with mask, behaviour logprobs and advantages.

A group becomes one sample per sequence of each usable rollout. Nothing is re-tokenised: the ids
trained on are the ids sampled.
"""

from collections.abc import Iterable
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltawire.job.spec import TrainSpec
from deltawire.protocol.rollouts import Rollout, Sequence
from deltawire_trainer.advantages import advantages_of
from deltawire_trainer.credit import Credit, Units, token_advantages, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One token sequence with what the loss needs of it.

    Example: token_ids ``[5 6 7 8]``, trained ``[2 3]``, behaviour_logprobs ``[-.1 -.2]``,
    versions ``[4 5]``: the last two tokens were sampled, by policy versions 4 and 5.
    """

    group_id: str
    rollout_id: str
    token_ids: NDArray[np.int64]
    """[length]"""
    trained: NDArray[np.int64]
    """[tokens] positions of sampled tokens, increasing, never 0."""
    behaviour_logprobs: NDArray[np.float32]
    """[tokens]"""
    versions: NDArray[np.int64]
    """[tokens] policy version that sampled each."""
    advantage: float = 0.0
    """Of the episode, for every token."""
    credit: NDArray[np.float64] | None = None
    """[tokens] what each token's own turn or token scores add to it (see credit.py)."""
    sampling_mask: list[list[int]] | None = None
    """[tokens] ids that could have been drawn, where top-p or top-k was used."""

    @property
    def inputs(self) -> NDArray[np.int64]:
        """What must be forwarded: the last trained token is only a target."""
        return self.token_ids[: self.trained[-1]]

    @property
    def oldest_version(self) -> int:
        """Oldest policy version of any trained token."""
        return int(self.versions.min())

    @property
    def advantages(self) -> NDArray[np.float32]:
        """[tokens] advantage of each trained token."""
        whole = np.full(len(self.trained), self.advantage)
        return (whole if self.credit is None else whole + self.credit).astype(np.float32)

    @property
    def has_signal(self) -> bool:
        """Whether any token has an advantage."""
        return bool(self.advantages.any())


def sample_of(
    group_id: str, rollout_id: str, sequence: Sequence, *, agent: int = 0
) -> TrainingSample | None:
    """A sequence as a sample; None when no token of it is trained.

    Position 0 has nothing before it to predict it from, so it is never trained.
    """
    mask = np.asarray(sequence.loss_mask, dtype=bool)
    mask[:1] = False
    trained = np.flatnonzero(mask).astype(np.int64)
    if not len(trained):
        return None
    return TrainingSample(
        group_id=group_id,
        rollout_id=f"{rollout_id}/{agent}" if agent else rollout_id,
        token_ids=np.asarray(sequence.token_ids, dtype=np.int64),
        trained=trained,
        behaviour_logprobs=np.asarray(sequence.logprobs, dtype=np.float32)[trained],
        versions=_token_versions(sequence)[trained],
        sampling_mask=_mask_of_trained(sequence, trained),
    )


def _token_versions(sequence: Sequence) -> NDArray[np.int64]:
    """[length] version of each token; 0 where no span covers it."""
    versions = np.zeros(len(sequence.token_ids), dtype=np.int64)
    for span in sequence.spans:
        versions[span.start : span.end] = span.version
    return versions


def _mask_of_trained(sequence: Sequence, trained: NDArray[np.int64]) -> list[list[int]] | None:
    """The recorded sets, if there is one for every sampled token (position 0 included)."""
    if sequence.sampling_mask is None:
        return None
    sets = sequence.sampling_mask
    skipped = sum(sequence.loss_mask) - len(trained)
    return sets[skipped:] if len(sets) == len(trained) + skipped else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """How rewards become advantages."""

    algorithm: str
    group_size: int
    credit: Credit = "episode"
    credit_weight: float = 1.0

    @classmethod
    def of(cls, spec: TrainSpec) -> "Weighing":
        """A job's."""
        return cls(
            algorithm=spec.algorithm,
            group_size=spec.group_size,
            credit=spec.credit,
            credit_weight=spec.credit_weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A sequence among those it is compared with."""

    sample: TrainingSample
    reward: float
    units: Units


def batch_samples(
    groups: PySequence[tuple[str, PySequence[Rollout]]],
    weighing: Weighing,
    *,
    agents: PySequence[str] = (),
) -> list[TrainingSample]:
    """Weighed samples of a step, from (group id, its usable rollouts).

    An episode may hold several sequences (agents, branches). Those of the same agent are compared
    with each other; a lone sequence has its episode's reward, several have their own.
    `agents` names whose sequences are trained on; none named: all.
    """
    members = list(_compared(groups, weighing, agents))
    rewards = [np.array([m.reward for m in rows], dtype=np.float64) for rows in members]
    advantages = advantages_of(
        rewards, algorithm=weighing.algorithm, group_size=weighing.group_size
    )
    credits = _credits(members, weighing)
    return [
        replace(member.sample, advantage=float(advantage), credit=credit)
        for rows, values, extra in zip(members, advantages, credits, strict=True)
        for member, advantage, credit in zip(rows, values, extra, strict=True)
    ]


def _compared(
    groups: PySequence[tuple[str, PySequence[Rollout]]],
    weighing: Weighing,
    agents: PySequence[str],
) -> Iterable[list[_Member]]:
    """The sequences of the same agent in the same group, for each of both."""
    members: dict[tuple[str, str], list[_Member]] = {}
    for group_id, rollouts in groups:
        for rollout in rollouts:
            alone = len(rollout.sequences) == 1
            for index, sequence in enumerate(rollout.sequences):
                if agents and sequence.agent not in agents:
                    continue
                sample = sample_of(group_id, rollout.rollout_id, sequence, agent=index)
                if sample is not None:
                    member = _Member(
                        sample=sample,
                        reward=rollout.reward if alone else sequence.reward,
                        units=units_of(sequence, sample.trained, weighing.credit),
                    )
                    members.setdefault((group_id, sequence.agent), []).append(member)
    return members.values()


def _credits(
    members: PySequence[PySequence[_Member]], weighing: Weighing
) -> list[list[NDArray[np.float64] | None]]:
    """What turn or token scores add to each sequence's tokens."""
    if weighing.credit == "episode":
        return [[None] * len(rows) for rows in members]
    found = token_advantages(
        [[member.units for member in rows] for rows in members],
        algorithm=weighing.algorithm,
        group_size=weighing.group_size,
    )
    return [[weighing.credit_weight * values for values in rows] for rows in found]
