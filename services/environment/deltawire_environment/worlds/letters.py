"""Write the letters that were asked for: dense reward, learnable in seconds by a tiny model."""

import random
import string

from pydantic import Field

from deltawire.job.transcript import Message
from deltawire.job.world import Action, Episode, Reply, World, WorldConfig, message_of
from deltawire.protocol.rollouts import Task


class LettersConfig(WorldConfig):
    """What is asked."""

    alphabet: str = Field(string.ascii_lowercase, min_length=1)
    length: int = Field(8, ge=1, le=256)
    """Characters that are looked at."""
    system: str = ""
    prompt: str = "Repeat the letter: {letter}"


class LettersWorld(World):
    """The reward is the share of the first characters that are the letter."""

    name = "letters"
    description = "Repeat one letter."
    Config = LettersConfig

    def __init__(self, config: LettersConfig) -> None:
        self.config = config

    def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        letter = rng.choice(self.config.alphabet)
        chat = [Message(role="system", content=self.config.system)] if self.config.system else []
        chat.append(Message(role="user", content=self.config.prompt.format(letter=letter)))
        return _Letters(letter, self.config.length), Reply(chat=chat)


class _Letters(Episode):
    def __init__(self, letter: str, length: int) -> None:
        self._letter, self._length = letter, length

    def step(self, action: Action) -> Reply:
        said = message_of(action)
        share = said[: self._length].count(self._letter) / self._length
        spans = [
            (at, at + 1, float(character == self._letter))
            for at, character in enumerate(said[: self._length])
        ]
        return Reply(reward=share, done=True, metrics={"share": share}, span_rewards=spans)
