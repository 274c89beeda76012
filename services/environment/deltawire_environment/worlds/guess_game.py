"""One game: guesses, faults, marks, and what is said of them."""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from deltawire.job.world import Action, BadAction, Episode, Reply
from deltawire_environment.worlds.guess_config import GuessConfig
from deltawire_environment.worlds.guess_reward import Score, final_reward, grade
from deltawire_environment.worlds.guess_text import GuessTexts, board
from deltawire_environment.worlds.marks import closeness, marks
from deltawire_environment.worlds.wordlist import Lexicon

LETTERS = 5
_IN_BRACKETS = re.compile(r"\[(\w+)\]")

Fault = Literal["no_word", "wrong_length", "repeated", "not_a_word"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What all games of a world share."""

    config: GuessConfig
    texts: GuessTexts
    allowed: frozenset[str]
    """Everything that counts as a word."""
    rewarded: Lexicon
    """Words that the graded reward pays for: not the ones the prompt shows."""
    hinted: bool
    """Whether the player is told the first letter."""


class Game(Episode):
    """Guesses so far. The secret leaves it only at the end."""

    def __init__(self, rules: Rules, secret: str) -> None:
        self._rules, self._secret = rules, secret
        self._guesses: list[str] = []
        self._said: set[str] = set()
        self._score = Score()
        self._turns = 0
        self._first_letters = 0
        self._faults_in_a_row = 0

    def step(self, action: Action) -> Reply:
        self._turns += 1
        message, word = _read(action)
        self._score.grades.append(
            grade(
                message,
                secret=self._secret,
                earlier=self._said,
                lexicon=self._rules.rewarded,
                hinted=self._rules.hinted,
                weights=self._rules.config.grades,
            )
        )
        self._said.add(word or "")
        self._first_letters += (word or "")[:1] == self._secret[0]
        fault = self._fault(word)
        return self._refuse(fault, word or "") if fault else self._take(word or "")

    def _fault(self, word: str | None) -> Fault | None:
        if word is None:
            return "no_word"
        if len(word) != LETTERS:
            return "wrong_length"
        if word in self._guesses:
            return "repeated"
        return None if word in self._rules.allowed else "not_a_word"

    def _take(self, word: str) -> Reply:
        signs = marks(self._secret, word)
        self._guesses.append(word)
        self._score.signs.append(signs)
        self._faults_in_a_row = 0
        if self._score.solved:
            return self._end(self._line("solved"), word, valid=True)
        if self._left == 0:
            return self._end(self._line("lost"), word, valid=True)
        return self._go_on(self._line("feedback", guess=word, signs=signs), word, valid=True)

    def _refuse(self, fault: Fault, word: str) -> Reply:
        self._score.invalid += 1
        self._score.repeats += fault == "repeated"
        self._faults_in_a_row += 1
        self._score.broke_rules = self._too_many_faults
        if self._score.broke_rules or self._left == 0:
            return self._end(self._line("lost"), word, valid=False)
        return self._go_on(self._line(fault, guess=word), word, valid=False)

    @property
    def _as_textarena(self) -> bool:
        return self._rules.config.style == "textarena"

    @property
    def _too_many_faults(self) -> bool:
        budget = self._rules.config.invalid_budget
        used = self._faults_in_a_row if self._as_textarena else self._score.invalid
        return budget is not None and used > budget

    @property
    def _left(self) -> int:
        """Guesses left. TextArena's rules do not count an invalid one."""
        used = len(self._guesses) if self._as_textarena else self._turns
        return max(0, self._rules.config.max_turns - used)

    def _line(self, which: str, *, guess: str = "", signs: str = "") -> str:
        template: str = getattr(self._rules.texts, which)
        return template.format(
            guess=guess,
            marks=signs,
            board=board(guess, signs) if signs else "",
            left=self._left,
            turns=self._rules.config.max_turns,
            first=self._secret[0],
            secret=self._secret if which == "lost" else "",
            percent=round(self._score.last * 100),
        )

    def _go_on(self, text: str, word: str, *, valid: bool) -> Reply:
        return Reply(
            text=text,
            reward=0.0 if self._as_textarena else None,
            info={"words": [*self._guesses]},
            metrics=self._metrics(),
            extra=self.board_fields(valid=valid),
        )

    def _end(self, text: str, word: str, *, valid: bool) -> Reply:
        config = self._rules.config
        return Reply(
            text=text,
            reward=final_reward(config.reward, self._score, turns=config.max_turns),
            done=True,
            info={"words": [*self._guesses], "secret": self._secret},
            metrics=self._metrics(),
            extra=self.board_fields(valid=valid),
        )

    def _metrics(self) -> dict[str, float]:
        score, signs = self._score, self._score.signs
        return {
            "solved": float(score.solved),
            "first_letter": self._first_letters / max(1, self._turns),
            "valid": len(signs) / max(1, self._turns),
            "guesses": float(len(self._guesses)),
            "greens": float(signs[-1].count("G")) if signs else 0.0,
            "yellows": float(signs[-1].count("Y")) if signs else 0.0,
            "closeness": closeness(signs[-1]) if signs else 0.0,
            "invalid": float(score.invalid),
            "repeats": float(score.repeats),
        }

    def board_fields(self, *, valid: bool = True) -> dict[str, JsonValue]:
        """Fields for clients that draw the game."""
        return {
            "turn": self._turns,
            "guesses_left": self._left,
            "feedback": self._score.signs[-1] if self._score.signs else "",
            "board": [[g, s] for g, s in zip(self._guesses, self._score.signs, strict=True)],
            "valid": valid,
        }

    def state(self) -> dict[str, JsonValue]:
        return {**self.board_fields(), "guesses": list(self._guesses)}


def _read(action: Action) -> tuple[str, str | None]:
    """The message, and the word in it, lower-cased; None when there is none."""
    bare = action.get("guess")
    if isinstance(bare, str):
        return f"[{bare}]", bare.strip().lower()
    message = action.get("message")
    if not isinstance(message, str):
        raise BadAction("a guess is {'message': 'text with [crane]'} or {'guess': 'crane'}")
    found = _IN_BRACKETS.search(message)
    return message, found.group(1).lower() if found else None
