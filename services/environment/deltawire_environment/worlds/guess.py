"""The five-letter guessing game. Same seed, same word: a group of episodes shares its secret."""

import random
import re

from pydantic import JsonValue

from deltawire.job.transcript import Message
from deltawire.job.world import Episode, Reply, Tool, World
from deltawire.protocol.rollouts import Task
from deltawire_environment.worlds.guess_config import GuessConfig
from deltawire_environment.worlds.guess_game import Game, Rules
from deltawire_environment.worlds.guess_text import gives_hint, opening_chat
from deltawire_environment.worlds.wordlist import Lexicon, WordList, load_words

_ACTION_SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "message": {"type": "string", "description": "Free text with the guess as [crane]."},
        "guess": {"type": "string", "description": "The bare word, instead of a message."},
    },
    "required": ["message"],
}


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
        prompt = " ".join(message["content"] for message in self.opening("?"))
        shown = set(re.findall(r"\[([a-z]{5})\]", prompt))
        self.rules = Rules(
            config=config,
            texts=self.texts,
            allowed=self.words.allowed,
            rewarded=Lexicon(self.words.allowed - shown),
            hinted=gives_hint(self.texts),
        )

    def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        secrets = self.words.secrets.get(task.split) or self.words.secrets["train"]
        secret = (
            secrets[task.index % len(secrets)] if task.index is not None else rng.choice(secrets)
        )
        game = self.play(secret)
        return game, Reply(chat=self.opening(secret), extra=game.board_fields())

    def play(self, secret: str) -> Game:
        """A game with that secret."""
        return Game(self.rules, secret)

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
