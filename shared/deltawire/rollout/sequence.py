"""A token sequence as it grows: what was read, what was sampled, by which policy version."""

from collections.abc import Sequence as Many
from typing import TypeVar

from deltawire.protocol.generation import Completion
from deltawire.protocol.rollouts import Sequence, Turn
from deltawire.protocol.versions import VersionSpan

T = TypeVar("T")


class SequenceBuilder:
    """Append-only. Sampled ids enter as they came from the engine and are never touched again."""

    def __init__(self, agent: str = "policy") -> None:
        self.agent = agent
        self.token_ids: list[int] = []
        self.turns: list[Turn] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._sampling_mask: list[list[int]] | None = []
        self._routed_experts: list[list[list[int]]] | None = []
        self._token_rewards: dict[int, float] = {}

    def read(self, ids: Many[int]) -> None:
        """Append tokens that the policy reads: prompt, template, environment."""
        self.token_ids += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def sampled(self, completion: Completion) -> None:
        """Append a completion as one turn."""
        start = len(self.token_ids)
        self.token_ids += completion.token_ids
        self._mask += [1] * len(completion.token_ids)
        self._logprobs += completion.logprobs
        for span in completion.spans:
            self._append_span(span, start)
        self._sampling_mask = _joined(self._sampling_mask, completion.sampling_mask)
        self._routed_experts = _joined(self._routed_experts, completion.routed_experts)
        self.turns.append(
            Turn(start=start, end=len(self.token_ids), finish_reason=completion.finish_reason)
        )

    def _append_span(self, span: VersionSpan, offset: int) -> None:
        self._spans.append(
            VersionSpan(version=span.version, start=offset + span.start, end=offset + span.end)
        )

    @property
    def last_turn_ids(self) -> list[int]:
        """Ids of the newest turn."""
        turn = self.turns[-1]
        return self.token_ids[turn.start : turn.end]

    def reward_turn(self, index: int, reward: float) -> None:
        """Score a turn alone."""
        self.turns[index] = self.turns[index].model_copy(update={"reward": reward})

    def reward_token(self, position: int, reward: float) -> None:
        """Add to the score of one token of the sequence."""
        self._token_rewards[position] = self._token_rewards.get(position, 0.0) + reward

    def build(self, *, reward: float) -> Sequence:
        """The sequence as it stands."""
        rewards = self._token_rewards
        return Sequence(
            agent=self.agent,
            token_ids=list(self.token_ids),
            loss_mask=list(self._mask),
            logprobs=list(self._logprobs),
            spans=list(self._spans),
            turns=list(self.turns),
            reward=reward,
            token_rewards=[rewards.get(i, 0.0) for i in range(len(self.token_ids))]
            if rewards
            else None,
            sampling_mask=self._sampling_mask or None,
            routed_experts=self._routed_experts or None,
        )


def _joined(so_far: list[T] | None, more: list[T] | None) -> list[T] | None:
    """Per-token facts are kept only while every completion brings them."""
    return None if so_far is None or more is None else so_far + more
