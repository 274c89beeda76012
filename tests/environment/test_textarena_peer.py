"""Our marks against TextArena's, on random pairs. Needs the `textarena` package (a test extra)."""

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest

from deltawire_environment.worlds.marks import marks
from deltawire_environment.worlds.wordlist import load_words

PAIRS = 100_000


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch):
    """TextArena's own function, with the corpora it would download replaced by nothing."""
    pytest.importorskip("textarena")
    nltk = ModuleType("nltk")
    nltk.pos_tag = lambda words: [(word, "NN") for word in words]  # type: ignore[attr-defined]
    corpus = ModuleType("nltk.corpus")
    corpus.words = SimpleNamespace(words=lambda *_: ["crane"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    monkeypatch.setitem(sys.modules, "nltk.corpus", corpus)
    from textarena.envs.Wordle.env import WordleEnv

    env = WordleEnv.__new__(WordleEnv)
    env.word_length = 5
    env.state = SimpleNamespace(game_state={"secret_word": "", "word_length": 5})

    def marks_of(secret: str, guess: str) -> str:
        env.state.game_state["secret_word"] = secret
        return "".join(env._evaluate_guess(guess))

    return marks_of


def test_feedback_equals_textarenas_on_100000_random_pairs(evaluate) -> None:
    rng = random.Random(0)
    words = sorted(load_words().allowed)
    doubles = [word for word in words if len(set(word)) < 5]
    for at in range(PAIRS):
        pool = doubles if at % 2 else words
        secret, guess = rng.choice(pool), rng.choice(pool)
        assert marks(secret, guess) == evaluate(secret, guess), (secret, guess)
