"""A data set as a world: the prompt of a row, one answer, judged by reward functions."""

import random

from pydantic import JsonValue

from deltawire.job.rows import Row, Rows
from deltawire.job.transcript import Message
from deltawire.job.world import (
    Action,
    BadAction,
    Episode,
    Reply,
    World,
    WorldConfig,
    message_of,
)
from deltawire.protocol.errors import JobError
from deltawire.protocol.rollouts import Task


class DatasetConfig(WorldConfig):
    """Which columns mean what."""

    prompt: str = "prompt"
    """Column with the question: a string, or a list of messages."""
    answer: str | None = None
    """Column with the right answer: rewards exact equality when the job has no rewards."""
    system: str | None = None
    """A system message before every prompt."""


class DatasetWorld(World):
    """One turn a row."""

    name = "dataset"
    description = "Answer the prompt of a data set's row."
    Config = DatasetConfig

    def __init__(self, config: DatasetConfig, rows: Rows) -> None:
        self.config, self.rows = config, rows
        for column in (config.prompt, config.answer):
            if column is not None and column not in rows.columns:
                raise JobError(
                    f"the data set has no column {column!r}; it has: {', '.join(rows.columns)}"
                )

    def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        row = self.rows.pick(task, rng)
        for column in (self.config.prompt, self.config.answer):
            if column is not None and column not in row:
                raise BadAction(f"the row has no column {column!r}; it has: {sorted(row)}")
        prompt = as_messages(row[self.config.prompt])
        if self.config.system is not None:
            prompt = [Message(role="system", content=self.config.system), *prompt]
        return _Answer(self.config, row), Reply(chat=prompt)

    def splits(self) -> list[str]:
        return self.rows.names()

    def task_count(self, split: str) -> int:
        return self.rows.count(split)


class _Answer(Episode):
    def __init__(self, config: DatasetConfig, row: Row) -> None:
        self.row = row
        self._config = config

    def step(self, action: Action) -> Reply:
        said = message_of(action).strip()
        if self._config.answer is None:
            return Reply(done=True)
        right = said == str(self.row[self._config.answer]).strip()
        return Reply(done=True, reward=float(right), metrics={"right": float(right)})


def as_messages(prompt: JsonValue) -> list[Message]:
    """A prompt as messages: a string is what the user says. Raises BadAction for anything else."""
    if isinstance(prompt, str):
        return [Message(role="user", content=prompt)]
    if not isinstance(prompt, list):
        raise BadAction(f"a prompt is a string or a list of messages, not {prompt!r:.80}")
    messages = []
    for item in prompt:
        if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
            raise BadAction(f"a message is {{role, content}}, not {item!r:.80}")
        messages.append(Message(role=str(item["role"]), content=str(item["content"])))
    return messages
