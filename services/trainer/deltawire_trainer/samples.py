"""Training samples: token sequences with mask, behaviour logprobs and one advantage each.

A group becomes one sample per sequence of each usable rollout. Nothing is re-tokenised: the ids
trained on are the ids sampled.
"""

from collections.abc import Sequence as PySequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltawire.protocol.rollouts import Rollout, Sequence
from deltawire_trainer.advantages import advantages_of


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

    def with_advantage(self, advantage: float) -> "TrainingSample":
        """The same sample, weighed."""
        return replace(self, advantage=advantage)


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


def batch_samples(
    groups: PySequence[tuple[str, PySequence[Rollout]]],
    *,
    algorithm: str,
    group_size: int,
    agents: PySequence[str] = (),
) -> list[TrainingSample]:
    """Weighed samples of a step, from (group id, its usable rollouts).

    An episode may hold several sequences (agents, branches). Those of the same agent are compared
    with each other; a lone sequence has its episode's reward, several have their own.
    `agents` names whose sequences are trained on; none named: all.
    """
    members: dict[tuple[str, str], list[tuple[TrainingSample, float]]] = {}
    for group_id, rollouts in groups:
        for rollout in rollouts:
            alone = len(rollout.sequences) == 1
            for index, sequence in enumerate(rollout.sequences):
                if agents and sequence.agent not in agents:
                    continue
                sample = sample_of(group_id, rollout.rollout_id, sequence, agent=index)
                if sample is not None:
                    reward = rollout.reward if alone else sequence.reward
                    members.setdefault((group_id, sequence.agent), []).append((sample, reward))
    rewards = [np.array([r for _, r in rows], dtype=np.float64) for rows in members.values()]
    advantages = advantages_of(rewards, algorithm=algorithm, group_size=group_size)
    return [
        sample.with_advantage(float(advantage))
        for rows, values in zip(members.values(), advantages, strict=True)
        for (sample, _), advantage in zip(rows, values, strict=True)
    ]
