"""Experience: what producers append and the trainer reads."""

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from deltawire.protocol.generation import Sampling
from deltawire.protocol.versions import PolicyVersion, VersionSpan, newest, oldest
from deltawire.protocol.wire_model import WireModel

ROLLOUT_SCHEMA = 1

RolloutStatus = Literal["ok", "truncated", "error"]


class Task(WireModel):
    """A problem with a start and a score: what `reset` gets. The same task for a whole group."""

    environment: str = ""
    """Name of the world in the environment service; empty for its default."""
    seed: int = Field(0, ge=0)
    split: str = "train"
    index: int | None = None
    row: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of reset, such as a dataset row."""


class Ticket(WireModel):
    """An order for one group. The trainer issues it, a producer claims it."""

    schema_number: int = ROLLOUT_SCHEMA
    ticket_id: str
    """Unique in the run, chosen by the trainer; becomes the group id."""
    run_id: str = ""
    task: Task
    group_size: int = Field(ge=1)
    sampling: Sampling = Sampling()
    max_turns: int = Field(1, ge=1)
    max_tokens: int = Field(4096, ge=1)
    """Prompt and completion of one sequence together."""
    min_version: PolicyVersion = PolicyVersion(0)
    """Born fresh: do not start an episode on an older policy."""
    policy_version: PolicyVersion | None = None
    """Pin, for evaluation."""
    deadline_s: float = Field(600.0, gt=0)
    """Seconds from the claim until the group must be finished."""
    purpose: Literal["train", "eval"] = "train"
    issued_at: float = 0.0


class Turn(WireModel):
    """Bounds of one completion inside a sequence, with what the environment said of it."""

    start: int
    """Index of its first sampled token in the sequence."""
    end: int
    reward: float | None = None
    finish_reason: str = "stop"


class Sequence(WireModel):
    """One token sequence of an episode (an agent, or a branch) as it was really sampled.

    Example of two turns: ids ``[P P P a a R R b b]`` has loss_mask ``[0 0 0 1 1 0 0 1 1]`` and
    logprobs ``[0 0 0 x x 0 0 x x]``: what the policy sampled is trained, what it read is not.
    """

    agent: str = "policy"
    token_ids: list[int]
    loss_mask: list[int]
    """[len(token_ids)] 1 where the policy sampled the token."""
    logprobs: list[float]
    """[len(token_ids)] behaviour logprobs, 0.0 where the mask is 0."""
    spans: list[VersionSpan]
    """Positions are those of token_ids; tokens not sampled belong to no span."""
    turns: list[Turn] = Field(default_factory=list)
    reward: float = 0.0
    token_rewards: list[float] | None = None
    sampling_mask: list[list[int]] | None = None
    """For each sampled token, in order, the ids that could have been drawn."""
    routed_experts: list[list[list[int]]] | None = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        n = len(self.token_ids)
        if len(self.loss_mask) != n or len(self.logprobs) != n:
            raise ValueError(
                f"{n} token ids, {len(self.loss_mask)} mask entries, {len(self.logprobs)} logprobs"
            )
        return self


class Rollout(WireModel):
    """The recorded episode as training experience."""

    rollout_id: str
    status: RolloutStatus = "ok"
    reason: str = ""
    """Why the status is not ok."""
    sequences: list[Sequence]
    reward: float = 0.0
    reward_parts: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    """What the environment measured beside the reward (solved, valid, ...)."""
    info: dict[str, JsonValue] = Field(default_factory=dict)
    """Small facts for people, such as the words guessed. Never used for training."""
    timings_s: dict[str, float] = Field(default_factory=dict)
    replica_id: str = ""
    environment_id: str = ""

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Oldest policy version of any sampled token."""
        return oldest(span for sequence in self.sequences for span in sequence.spans)

    @property
    def newest_version(self) -> PolicyVersion | None:
        """Newest policy version of any sampled token."""
        return newest(span for sequence in self.sequences for span in sequence.spans)


class RolloutGroup(WireModel):
    """Rollouts of the same task sampled together for a relative baseline."""

    schema_number: int = ROLLOUT_SCHEMA
    group_id: str
    """The ticket's id."""
    run_id: str = ""
    task: Task
    rollouts: list[Rollout]
    purpose: Literal["train", "eval"] = "train"
    producer_id: str = ""
    finished_at: float = 0.0

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Oldest policy version of any sampled token of the group."""
        versions = [v for r in self.rollouts if (v := r.oldest_version) is not None]
        return min(versions, default=None)
