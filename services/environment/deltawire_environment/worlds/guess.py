"""The five-letter guessing game. Same seed, same word: a group of episodes shares its secret."""

import random
import re
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from deltawire.job.transcript import Message
from deltawire.job.world import Action, BadAction, Episode, Reply, Tool, World, WorldConfig
from deltawire.protocol.rollouts import Task
from deltawire_environment.worlds.guess_reward import (
    GradeWeights,
    RewardKind,
    Score,
    final_reward,
    grade,
)
from deltawire_environment.worlds.guess_text import (
    TEXTS,
    GuessTexts,
    Style,
    board,
    gives_hint,
    opening_chat,
)
from deltawire_environment.worlds.marks import closeness, marks
from deltawire_environment.worlds.wordlist import WordList, load_words

LETTERS = 5
_IN_BRACKETS = re.compile(r"\[(\w+)\]")

_ACTION_SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "message": {"type": "string", "description": "Free text with the guess as [crane]."},
        "guess": {"type": "string", "description": "The bare word, instead of a message."},
    },
    "required": ["message"],
}

Fault = Literal["no_word", "wrong_length", "repeated", "not_a_word"]


class GuessConfig(WorldConfig):
    """How the game is played and paid."""

    max_turns: int = Field(6, ge=1)
    """Guesses."""
    reward: RewardKind = "binary"
    style: Style = "plain"
    """Whose words the game speaks; `textarena` also takes that game's rules for faults."""
    texts: dict[str, JsonValue] = Field(default_factory=dict)
    """Lines to replace in the style: system, opening, worked, feedback, ..."""
    invalid_budget: int | None = Field(1, ge=0)
    """Invalid guesses that are forgiven; one more ends the game. None forgives all."""
    grades: GradeWeights = GradeWeights()
    """Weights of the `graded` reward."""

    @model_validator(mode="after")
    def _texts_are_known(self) -> "GuessConfig":
        self.spoken()
        return self

    def spoken(self) -> GuessTexts:
        """The style's lines with the job's own in their place."""
        return GuessTexts.model_validate({**TEXTS[self.style].model_dump(), **self.texts})


class GuessWorld(World):
    """Shares one pair of word lists among all games."""

    name = "guess"
    description = "Guess a secret five-letter word; every letter of a guess is marked G, Y or X."
    Config = GuessConfig

    def __init__(self, config: GuessConfig, words: WordList | None = None) -> None:
        self.config = config
        self.texts = config.spoken()
        self.max_turns = config.max_turns
        self.words = words or load_words()
        self.hinted = gives_hint(self.texts)
        prompt = " ".join(message["content"] for message in self.opening("?"))
        self.rewarded = self.words.allowed - set(re.findall(r"\[([a-z]{5})\]", prompt))

    def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        secrets = self.words.secrets.get(task.split) or self.words.secrets["train"]
        secret = (
            secrets[task.index % len(secrets)] if task.index is not None else rng.choice(secrets)
        )
        game = Game(self, secret)
        return game, Reply(chat=self.opening(secret), extra=game.board_fields())

    def opening(self, secret: str) -> list[Message]:
        """What a player reads first."""
        return opening_chat(self.texts, turns=self.config.max_turns, first=secret[0])

    def action_schema(self) -> dict[str, JsonValue]:
        return _ACTION_SCHEMA

    def tools(self) -> list[Tool]:
        schema: dict[str, JsonValue] = {
            "type": "object",
            "properties": {"guess": {"type": "string"}},
            "required": ["guess"],
        }
        return [Tool(name="guess", description="Guess a five-letter word.", parameters=schema)]

    def task_count(self, split: str) -> int:
        return len(self.words.secrets.get(split, ()))


class Game(Episode):
    """Guesses so far. The secret leaves it only at the end."""

    def __init__(self, world: GuessWorld, secret: str) -> None:
        self._world, self._secret = world, secret
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
                words=self._world.rewarded,
                hinted=self._world.hinted,
                weights=self._world.config.grades,
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
        return None if word in self._world.words.allowed else "not_a_word"

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
        return self._world.config.style == "textarena"

    @property
    def _too_many_faults(self) -> bool:
        budget = self._world.config.invalid_budget
        used = self._faults_in_a_row if self._as_textarena else self._score.invalid
        return budget is not None and used > budget

    @property
    def _left(self) -> int:
        """Guesses left. TextArena's rules do not count an invalid one."""
        used = len(self._guesses) if self._as_textarena else self._turns
        return max(0, self._world.config.max_turns - used)

    def _line(self, which: str, *, guess: str = "", signs: str = "") -> str:
        template: str = getattr(self._world.texts, which)
        return template.format(
            guess=guess,
            marks=signs,
            board=board(guess, signs) if signs else "",
            left=self._left,
            turns=self._world.config.max_turns,
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
        config = self._world.config
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
