"""The seam between a world and whoever serves it: start an episode, step it, close it.

A World is immutable and shared by all sessions (word lists, data sets); an Episode is the state of
one game. Built-in worlds, a user's class and a data set are all served through these two.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, JsonValue

from deltawire.job.transcript import Message
from deltawire.protocol.rollouts import Task

Action = Mapping[str, JsonValue]
"""What the policy did. `{"message": text}` unless the world's schema says otherwise."""


ENV_NAMES = ("max_turns", "max_tokens", "sessions", "dataset")
"""What Env itself takes; every other keyword is an argument of the world."""


class BadAction(ValueError):
    """The action makes no sense in this world: the client's fault, not the world's."""


MESSAGE_SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "What the policy said."}},
    "required": ["message"],
}
"""JSON schema of the plain action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a world answers to a reset or a step.

    Example: ``Reply(text="G X X Y X", metrics={"greens": 1.0})`` goes on;
    ``Reply(text="Solved.", reward=1.0, done=True)`` ends the episode.
    """

    text: str = ""
    """What the policy reads next, as one user message; unless `chat` is given."""
    chat: list[Message] | None = None
    """The new messages of this turn: system, user and worked turns on reset."""
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, JsonValue] = field(default_factory=dict)
    """Small facts for people. Never a secret before the end: the policy's side can read it."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_reward: float | None = None
    """A score of this turn alone, beside the episode's reward."""
    span_rewards: list[tuple[int, int, float]] | None = None
    """(start, end, score) over characters of the policy's last message; become token scores."""
    agent: str = "policy"
    """Who speaks next, in a world with several agents."""
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    """At the end, each agent's own reward, in a world with several."""
    status: Literal["ok", "truncated", "error"] = "ok"
    reason: str = ""
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    """Further fields of the observation, for clients that know this world."""

    @property
    def messages(self) -> list[Message]:
        """The new messages of this turn."""
        if self.chat is not None:
            return self.chat
        return [Message(role="user", content=self.text)] if self.text else []

    def observation(self) -> dict[str, JsonValue]:
        """The observation as it travels. Optional fields appear only when they say something."""
        seen: dict[str, JsonValue] = {
            **self.extra,
            "chat": [{"role": m["role"], "content": m["content"]} for m in self.messages],
            "text": self.text,
            "metrics": dict(self.metrics),
            "info": dict(self.info),
            "status": self.status,
        }
        optional: dict[str, JsonValue] = {
            "reason": self.reason,
            "reward_parts": dict(self.reward_parts),
            "agent_rewards": dict(self.agent_rewards),
            "agent": "" if self.agent == "policy" else self.agent,
        }
        seen.update({name: value for name, value in optional.items() if value})
        if self.turn_reward is not None:
            seen["turn_reward"] = self.turn_reward
        if self.span_rewards is not None:
            seen["span_rewards"] = [list(span) for span in self.span_rewards]
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Something a policy can call by name."""

    name: str
    description: str
    parameters: dict[str, JsonValue]
    """JSON schema of the arguments."""


class Meter(Protocol):
    """Where a world may count and time things; the service's metrics are one."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None: ...
    def observe(self, name: str, seconds: float) -> None: ...


class Episode(ABC):
    """One game: its state, and nothing another game can see."""

    row: Mapping[str, JsonValue] = MappingProxyType({})
    """The data set's row, for reward functions. Never sent to a client."""

    @abstractmethod
    def step(self, action: Action) -> Reply | Awaitable[Reply]:
        """Take the policy's action. Raise BadAction for one that makes no sense."""

    def state(self) -> dict[str, JsonValue]:
        """What may be shown while it runs. Never the answer."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Give back what the episode holds. Most hold nothing."""
        return None


class WorldConfig(BaseModel):
    """The arguments of a world, as a job file gives them. Unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class World(ABC):
    """A kind of game. Immutable; many episodes run on one."""

    name: str
    description: str = ""
    blocking: bool = False
    """True when start, step or close may block; they then run in the service's bounded pool."""
    max_turns: int = 1
    """How many turns an episode may take, when the job does not say."""
    Config: ClassVar[type[WorldConfig]] = WorldConfig

    @abstractmethod
    def start(
        self, task: Task, rng: random.Random
    ) -> tuple[Episode, Reply] | Awaitable[tuple[Episode, Reply]]:
        """Begin an episode. `rng` is seeded by the task: draw every choice from it."""

    def action_schema(self) -> dict[str, JsonValue]:
        """JSON schema of an action. Exactly one required string lets any client send raw text."""
        return MESSAGE_SCHEMA

    def tools(self) -> list[Tool]:
        """What MCP clients may call. By default the action itself, as one tool."""
        return [Tool(name="act", description=self.description, parameters=self.action_schema())]

    def tool_action(self, name: str, arguments: Mapping[str, JsonValue]) -> Action:
        """The action that calling a tool means."""
        return arguments

    def splits(self) -> list[str]:
        """Names of the task splits."""
        return ["train", "eval"]

    def task_count(self, split: str) -> int | None:
        """How many tasks a split has; None when seeds make as many as you like."""
        return None

    def task(self, split: str, index: int) -> dict[str, JsonValue]:
        """One task as listed to clients; without its answer."""
        return {"split": split, "index": index, "seed": index}

    def use_meter(self, meter: Meter) -> None:  # noqa: B027 - most measure nothing
        """Count and time with this one from now on."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the world holds, at the end of the service."""


def message_of(action: Action) -> str:
    """The text of a plain action. Raises BadAction when there is none."""
    text = action.get("message")
    if not isinstance(text, str):
        raise BadAction(f"an action is {{'message': text}}; found the fields {sorted(action)}")
    return text
