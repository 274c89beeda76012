"""`reasoning:<dataset>`: any of the data sets of reasoning-gym, when that package is installed."""

import importlib
import random
from typing import Protocol

from pydantic import Field, JsonValue

from deltawire.job.suggestion import unknown
from deltawire.job.transcript import Message
from deltawire.job.world import Action, Episode, Reply, World, WorldConfig, message_of
from deltawire.protocol.errors import JobError
from deltawire.protocol.rollouts import Task

_INSTALL = "pip install 'deltawire-environment[reasoning]'"


class ReasoningConfig(WorldConfig):
    """Which data set, and its own arguments."""

    variant: str
    """Name of the data set: `countdown`, `leg_counting`, ..."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the data set: ranges, difficulty."""
    size: int = Field(10_000, ge=1)
    """Items of the training split; evaluation has a tenth, of another seed."""
    system: str = "Think, then give the final answer alone inside <answer></answer>."


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> dict[str, JsonValue]: ...
    def score_answer(self, answer: str | None, entry: dict[str, JsonValue]) -> float: ...


class ReasoningWorld(World):
    """One item a seed; the package's own verifier scores the answer."""

    name = "reasoning"
    description = "A procedurally made puzzle with a verifier."
    blocking = True  # some data sets search for seconds
    Config = ReasoningConfig

    def __init__(self, config: ReasoningConfig) -> None:
        """Raises JobError without the package, or for a data set it does not know."""
        self.config = config
        self._sizes = {"train": config.size, "eval": max(1, config.size // 10)}
        self._sets = {
            split: _open(config, seed=seed, size=self._sizes[split])
            for seed, split in enumerate(("train", "eval"))
        }

    def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        split = task.split if task.split in self._sets else "train"
        size = self._sizes[split]
        index = task.index % size if task.index is not None else rng.randrange(size)
        puzzle = self._sets[split]
        entry = puzzle[index]
        chat = [Message(role="system", content=self.config.system)] if self.config.system else []
        chat.append(Message(role="user", content=str(entry["question"])))
        return _Puzzle(puzzle, entry), Reply(chat=chat)

    def task_count(self, split: str) -> int:
        return self._sizes.get(split, 0)


class _Puzzle(Episode):
    def __init__(self, puzzle: _Dataset, entry: dict[str, JsonValue]) -> None:
        self._puzzle, self._entry = puzzle, entry

    def step(self, action: Action) -> Reply:
        said = message_of(action)
        answer = answer_in(said)
        reward = float(self._puzzle.score_answer(answer, self._entry))
        return Reply(
            reward=reward,
            done=True,
            metrics={"solved": float(reward == 1.0), "answered": float(answer is not None)},
            info={"answer": str(self._entry.get("answer"))},
        )


def answer_in(text: str) -> str | None:
    """What stands in the last `<answer>` of a text; None when there is none."""
    _, opened, after = text.rpartition("<answer>")
    answer, closed, _ = after.partition("</answer>")
    return answer.strip() if opened and closed else None


def _open(config: ReasoningConfig, *, seed: int, size: int) -> _Dataset:
    try:
        gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        raise JobError(f"the world 'reasoning' needs {error.name}: {_INSTALL}") from None
    if config.variant not in known:
        raise JobError(unknown("reasoning data set", config.variant, known))
    dataset: _Dataset = gym.create_dataset(config.variant, seed=seed, size=size, **config.options)
    return dataset
