"""What a user writes: one file with a `job = Job(...)` in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from deltawire.job.reward import RewardBody, Rewarder, reward
from deltawire.job.world import World
from deltawire.protocol.errors import JobError

WorldLike = str | type | World
"""A name (`"guess"`, `"reasoning:countdown"`), your own class, or a made world (a Dataset)."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model to train. `preset` picks one by name instead of by the model's size."""

    source: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    preset: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True, init=False)
class Env:
    """The world, and how episodes are shaped. Other keywords are arguments of the world."""

    world: WorldLike | None
    dataset: object
    """Rows: a .jsonl path beside the job file, a list of dicts, or a `datasets.Dataset`."""
    max_turns: int | None
    max_tokens: int | None
    """Of a whole sequence, prompt included."""
    sessions: int | None
    """Parallel episodes the job wants."""
    config: Mapping[str, JsonValue]

    def __init__(
        self,
        world: WorldLike | None = None,
        *,
        dataset: object = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        sessions: int | None = None,
        **config: JsonValue,
    ) -> None:
        if world is None and dataset is None:
            raise JobError('an Env needs a world or a data set: Env("guess"), Env(dataset=...)')
        for name, value in (
            ("world", world),
            ("dataset", dataset),
            ("max_turns", max_turns),
            ("max_tokens", max_tokens),
            ("sessions", sessions),
            ("config", config),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job. Only `name` and `env` are needed; the rest overrides a preset.

    `sampling`, `train`, `sync` and `eval` take the names of the sections of `JobSpec`. Without
    `rewards` the world's own reward is trained on.
    """

    name: str
    env: Env | WorldLike
    model: Model | str = Model()
    rewards: Sequence[Rewarder | RewardBody] = ()
    """Functions made with `@reward`, plain ones (weight 1), or an HttpScorer."""
    sampling: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=dict)
    sync: Mapping[str, object] = field(default_factory=dict)
    eval: Mapping[str, object] | None = None
    show: Sequence[str] = ()
    """Metrics to show beside the reward."""
    folder: Path = Path()
    """Where the job file lies; set when it is loaded."""

    @property
    def rewarders(self) -> list[Rewarder]:
        """The rewards; plain functions become named ones. Raises JobError for what is neither."""
        return [_rewarder(part) for part in self.rewards]


def _rewarder(part: Rewarder | RewardBody) -> Rewarder:
    if isinstance(part, Rewarder):
        return part
    if callable(part):
        return reward(part)
    raise JobError(f"a reward is a function or an HttpScorer, not {part!r}")
