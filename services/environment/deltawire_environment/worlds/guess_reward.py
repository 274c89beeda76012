"""What a game was worth. Each kind is a pure function of what was guessed."""

import re
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from deltawire_environment.worlds.marks import closeness

RewardKind = Literal["binary", "partial", "textarena", "graded"]

_PAIRS = re.compile(r"\[([^\[\]]*)\]")


class GradeWeights(BaseModel):
    """Parts of the graded reward, for a model that must first learn the form of an answer.

    The reward is the mean grade of the turns times `1 - closeness`, plus `closeness` times the
    best guess's closeness, minus `repeat` for each repeated word a turn; solving makes it 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bracket: float = 0.05
    """For each kind of bracket that is there, when they make no single pair."""
    pair: float = 0.15
    """Exactly one pair of brackets."""
    near: float = 0.15
    """Letters only; less for each letter too many or too few."""
    five: float = 0.1
    """Five letters."""
    only: float = 0.1
    """Nothing outside the brackets."""
    listed: float = 0.5
    """A word, and not one that the prompt shows."""
    closeness: float = 0.2
    repeat: float = 0.2


@dataclass(slots=True)
class Score:
    """What has happened in one game so far."""

    grades: list[float] = field(default_factory=list)
    """One a turn."""
    signs: list[str] = field(default_factory=list)
    """Marks of the valid guesses, in order."""
    invalid: int = 0
    repeats: int = 0
    broke_rules: bool = False
    """Ended by too many invalid guesses."""

    @property
    def solved(self) -> bool:
        return bool(self.signs) and set(self.signs[-1]) == {"G"}

    @property
    def best(self) -> float:
        """Closeness of the best guess."""
        return max(map(closeness, self.signs), default=0.0)

    @property
    def last(self) -> float:
        """Closeness of the last valid guess."""
        return closeness(self.signs[-1]) if self.signs else 0.0


def final_reward(kind: RewardKind, score: Score, weights: GradeWeights) -> float:
    """The episode's reward. Breaking the rules never pays, except where TextArena pays for it."""
    if score.solved:
        return 1.0
    match kind:
        case "textarena":
            return score.last
        case "binary":
            return 0.0
        case "partial":
            return 0.0 if score.broke_rules else score.last
        case "graded":
            turns = max(1, len(score.grades))
            form = sum(score.grades) / turns * (1.0 - weights.closeness)
            return form + weights.closeness * score.best - weights.repeat * score.repeats / turns


def grade(
    message: str, *, allowed: frozenset[str], shown: frozenset[str], w: GradeWeights
) -> float:
    """How well-formed one message is, between 0 and about 1."""
    pairs = _PAIRS.findall(message)
    single = len(pairs) == 1 and message.count("[") == 1 and message.count("]") == 1
    if not single:
        return w.bracket * (("[" in message) + ("]" in message))
    word = pairs[0]
    letters = bool(re.fullmatch("[a-zA-Z]+", word))
    five = bool(re.fullmatch("[a-z]{5}", word))
    near = max(0.0, 1.0 - abs(len(word) - 5) / 5) if letters else 0.0
    only = message.strip() == f"[{word}]"
    listed = word in allowed and word not in shown
    return w.pair + w.near * near + w.five * five + w.only * only + w.listed * listed
