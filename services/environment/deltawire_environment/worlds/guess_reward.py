"""What a game was worth. Each kind is a pure function of what was guessed."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from deltawire_environment.worlds.marks import closeness, marks
from deltawire_environment.worlds.wordlist import Lexicon

RewardKind = Literal["binary", "partial", "textarena", "graded"]

_PAIRS = re.compile(r"\[([^\[\]]*)\]")


class GradeWeights(BaseModel):
    """Points of one guess in the `graded` reward, for a model that must first learn the form.

    Only a single pair of brackets around letters, not guessed before, earns any. Where the game
    gives a hint, a guess that breaks it earns nothing for being a word. The defaults add up to 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    only: float = 0.05
    """Nothing outside the brackets."""
    near: float = 0.15
    """Five letters; less for each one too many or too few."""
    hint: float = 0.15
    """Keeps the hint; given to every guess where there is none."""
    begun: float = 0.25
    """Share of the letters beyond the hint, from the left, that some word begins with: a slope
    from random letters to words, which a policy that spells too seldom gets right to learn from."""
    listed: float = 0.2
    """A word, and not one that the prompt shows."""
    greens: float = 0.2
    """Share of right places beyond the hint."""


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


def final_reward(kind: RewardKind, score: Score, *, turns: int) -> float:
    """The episode's reward. Breaking the rules never pays, except where TextArena pays for it.

    `graded` is the mean over all `turns` of the game, so that ending it early earns nothing.
    """
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
            return sum(score.grades) / turns


def grade(
    message: str,
    *,
    secret: str,
    earlier: Collection[str],
    lexicon: Lexicon,
    hinted: bool,
    weights: GradeWeights,
) -> float:
    """Points of one guess, between 0 and 1. `lexicon` has the words worth points for being one."""
    pairs = _PAIRS.findall(message)
    word = pairs[0] if len(pairs) == 1 else ""
    if not re.fullmatch("[a-z]+", word) or word in earlier:
        return 0.0
    points = weights.only * (message.strip() == f"[{word}]")
    points += weights.near * max(0.0, 1.0 - abs(len(word) - len(secret)) / 4)
    if hinted and word[0] != secret[0]:
        return points
    given = int(hinted)
    points += weights.hint
    points += weights.begun * max(0, lexicon.begun(word) - given) / (len(secret) - given)
    if word in lexicon.words:
        right = marks(secret, word).count("G") - given
        points += weights.listed + weights.greens * right / (len(secret) - given)
    return points
