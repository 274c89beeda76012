"""The two word lists: secrets, and everything that counts as a word."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

_EVAL_SHARE = 10
"""One secret in this many is held out for evaluation, by the hash of the word."""


@dataclass(frozen=True, slots=True)
class WordList:
    """Shared by all games; read once."""

    secrets: dict[str, tuple[str, ...]]
    """Split -> secrets in one fixed order, shuffled: tasks in a row must not look alike."""
    allowed: frozenset[str]
    """Every five-letter guess that is a word; holds all secrets."""


class Lexicon:
    """A set of words that also knows how far any letters follow one of them."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = frozenset(words)
        self._beginnings = frozenset(
            word[:end] for word in self.words for end in range(len(word) + 1)
        )

    def begun(self, letters: str) -> int:
        """How many of the letters, from the left, some word begins with."""
        kept = len(letters)
        while letters[:kept] not in self._beginnings:
            kept -= 1
        return kept


def held_out(word: str) -> bool:
    """Whether a secret belongs to the `eval` split. The same in every process, for ever."""
    return _hash(word)[0] % _EVAL_SHARE == 0


def _hash(word: str) -> bytes:
    return hashlib.sha256(word.encode()).digest()


def load_words() -> WordList:
    """Read the lists that ship with the package."""
    folder = files("deltawire_environment.worlds.words")
    answers = sorted((folder / "answers.txt").read_text(encoding="ascii").split(), key=_hash)
    allowed = (folder / "allowed.txt").read_text(encoding="ascii").split()
    return WordList(
        secrets={
            "train": tuple(word for word in answers if not held_out(word)),
            "eval": tuple(word for word in answers if held_out(word)),
        },
        allowed=frozenset(allowed),
    )
