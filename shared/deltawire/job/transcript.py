"""What happened in one episode: what a reward function gets to see."""

from dataclasses import dataclass, field
from typing import TypedDict

from pydantic import JsonValue

from deltawire.protocol.rollouts import Task


class Message(TypedDict):
    """One message of a conversation, as chat templates take it."""

    role: str
    content: str


@dataclass(slots=True, kw_only=True)
class Transcript:
    """The record of one episode. A reward function reads it and returns a number.

    Example: ``Transcript(task=Task(seed=3), messages=[{"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"}], prompt_length=1)`` has ``last == "4"``.
    """

    task: Task
    """Seed, split and dataset row of the episode."""
    messages: list[Message]
    """The whole conversation, both sides, in order."""
    prompt_length: int = 0
    """How many leading messages the world wrote before the policy spoke."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the world measured: solved, valid, ..."""
    info: dict[str, JsonValue] = field(default_factory=dict)
    """Small facts: words guessed, the answer, what a tool returned."""
    reward: float = 0.0
    """The world's own reward so far."""
    done: bool = False

    @property
    def replies(self) -> list[str]:
        """What the policy said, turn by turn."""
        spoken = self.messages[self.prompt_length :]
        return [message["content"] for message in spoken if message["role"] == "assistant"]

    @property
    def turns(self) -> int:
        """How many times the policy spoke."""
        return len(self.replies)

    @property
    def last(self) -> str:
        """The policy's last message, or "" when it said nothing."""
        return self.replies[-1] if self.replies else ""

    @property
    def row(self) -> dict[str, JsonValue]:
        """The dataset row, or further arguments of reset."""
        return self.task.row
