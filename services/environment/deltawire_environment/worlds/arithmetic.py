"""Sums of small numbers: one turn, one number, checked exactly."""

import random
import re
from typing import Literal

from pydantic import Field, model_validator

from deltawire.job.transcript import Message
from deltawire.job.world import Action, Episode, Reply, World, WorldConfig, message_of
from deltawire.protocol.rollouts import Task

Operation = Literal["+", "-", "*"]

_NUMBER = re.compile(r"-?\d+")


class ArithmeticConfig(WorldConfig):
    """How hard the sums are."""

    operations: list[Operation] = Field(default=["+"], min_length=1)
    smallest: int = 0
    largest: int = 20
    terms: int = Field(2, ge=2, le=8)
    partial: float = Field(0.1, ge=0.0, le=1.0)
    """For a lone number that is wrong; less the further it is off."""
    system: str = "Answer with one number and nothing else."

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> "ArithmeticConfig":
        if self.smallest > self.largest:
            raise ValueError(f"smallest={self.smallest} is above largest={self.largest}")
        return self


class ArithmeticWorld(World):
    """A new sum for every seed."""

    name = "arithmetic"
    description = "Work out a small sum; answer with the number only."
    Config = ArithmeticConfig

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config

    def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        config = self.config
        numbers = [rng.randint(config.smallest, config.largest) for _ in range(config.terms)]
        signs = [rng.choice(config.operations) for _ in numbers[1:]]
        question = f"{numbers[0]}" + "".join(
            f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True)
        )
        chat = [Message(role="system", content=config.system)] if config.system else []
        chat.append(Message(role="user", content=f"{question} ="))
        return _Sum(result_of(numbers, signs), config.partial), Reply(chat=chat)


class _Sum(Episode):
    def __init__(self, answer: int, partial: float) -> None:
        self._answer, self._partial = answer, partial

    def step(self, action: Action) -> Reply:
        said = message_of(action).strip()
        numbers = _NUMBER.findall(said)
        lone = bool(_NUMBER.fullmatch(said)) and len(said) <= 12
        right = len(numbers) == 1 and len(numbers[0]) <= 12 and int(numbers[0]) == self._answer
        reward = float(right) if lone else 0.5 * right
        if lone and not right:
            reward = self._partial / (1 + abs(int(said) - self._answer))
        return Reply(
            reward=reward,
            done=True,
            metrics={"right": float(right), "lone_number": float(lone)},
            info={"answer": self._answer},
        )


def result_of(numbers: list[int], signs: list[Operation]) -> int:
    """The value of a sum; products first, as at school."""
    terms = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            terms[-1] *= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms)
