"""The shorter the better: if this does not learn, the loop is broken."""

import random

from pydantic import Field

from deltawire.job.world import Action, Episode, Reply, World, WorldConfig, message_of
from deltawire.protocol.rollouts import Task


class StopEarlyConfig(WorldConfig):
    """When the reward reaches zero."""

    longest: int = Field(64, ge=1)
    """Characters."""
    prompt: str = "Say something."


class StopEarlyWorld(World):
    """A sanity task without right and wrong."""

    name = "stop_early"
    description = "Say as little as possible."
    Config = StopEarlyConfig

    def __init__(self, config: StopEarlyConfig) -> None:
        self.config = config

    def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        return _Silence(self.config.longest), Reply(text=f"{self.config.prompt} ({task.seed})")


class _Silence(Episode):
    def __init__(self, longest: int) -> None:
        self._longest = longest

    def step(self, action: Action) -> Reply:
        length = len(message_of(action))
        reward = max(0.0, 1.0 - length / self._longest)
        return Reply(reward=reward, done=True, metrics={"characters": float(length)})
