"""The guessing game: its rules, its rewards, and that the secret stays one."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.job.world import BadAction
from deltawire.protocol.rollouts import Task
from deltawire_environment.worlds.guess import GuessWorld
from deltawire_environment.worlds.guess_config import GuessConfig
from deltawire_environment.worlds.guess_game import Game
from deltawire_environment.worlds.guess_reward import GradeWeights, grade
from deltawire_environment.worlds.guess_text import TEXTS
from deltawire_environment.worlds.marks import closeness, marks
from deltawire_environment.worlds.wordlist import Lexicon, held_out, load_words

WORDS = load_words()
five_letters = st.text("abcdefgh", min_size=5, max_size=5)


def game(secret: str, **config: object) -> Game:
    return GuessWorld(GuessConfig(**config), WORDS).play(secret)


@pytest.mark.parametrize(
    ("secret", "guess", "expected"),
    [
        ("abbey", "babes", "YYGGX"),
        ("crane", "eerie", "XXYXG"),
        ("level", "eleve", "YYYYX"),
        ("adopt", "crane", "XXYXX"),
        ("crane", "crane", "GGGGG"),
    ],
)
def test_marks_agree_with_the_golden_vectors(secret: str, guess: str, expected: str) -> None:
    assert marks(secret, guess) == expected


@given(five_letters, five_letters)
def test_marks_answer_each_letter_of_the_secret_at_most_once(secret: str, guess: str) -> None:
    signs = marks(secret, guess)
    assert [s == "G" for s in signs] == [a == b for a, b in zip(secret, guess, strict=True)]
    for letter in set(guess):
        answered = sum(g == letter and s != "X" for g, s in zip(guess, signs, strict=True))
        assert answered == min(secret.count(letter), guess.count(letter))
    assert 0.0 <= closeness(signs) <= 1.0


def test_the_same_seed_draws_the_same_secret_in_every_process_and_split() -> None:
    def secret(seed: int, split: str) -> str:
        world = GuessWorld(GuessConfig(), WORDS)
        drawn, _ = world.start(Task(seed=seed, split=split), random.Random(f"{seed}/{split}"))
        return drawn._secret

    assert [secret(3, "train"), secret(4, "train")] == [secret(3, "train"), secret(4, "train")]
    assert len({secret(seed, "train") for seed in range(40)}) > 30
    assert all(held_out(secret(seed, "eval")) for seed in range(40))
    assert not any(held_out(secret(seed, "train")) for seed in range(40))


def test_tasks_in_a_row_do_not_look_alike() -> None:
    for split in ("train", "eval"):
        words = WORDS.secrets[split]
        for start in range(0, 160, 8):
            assert len({word[0] for word in words[start : start + 8]}) >= 4


def test_the_splits_share_no_word_and_every_secret_may_be_guessed() -> None:
    train, held = set(WORDS.secrets["train"]), set(WORDS.secrets["eval"])
    assert not train & held
    assert train | held <= WORDS.allowed
    assert 0.05 < len(held) / len(train | held) < 0.15


def test_a_win_with_the_last_guess_is_a_win() -> None:
    played = game("crane", max_turns=6)
    for guess in ("moist", "bulky", "fudge", "whelp", "jumbo"):
        assert not played.step({"guess": guess}).done
    end = played.step({"message": "It must be [CRANE]!"})
    assert end.done
    assert end.reward == 1.0
    assert end.metrics["solved"] == 1.0


def test_a_game_speaks_as_textarena_does() -> None:
    played = game("adopt", style="textarena", reward="textarena")
    assert TEXTS["textarena"].opening.startswith("You are Playing Wordle.\nA secret 5-letter word")
    reply = played.step({"message": "[crane]"})
    assert reply.text == (
        "You submitted [crane].\nFeedback:\nC R A N E\nX X Y X X\nYou have 5 guesses left."
    )
    assert reply.reward == 0.0


def test_textarena_forgives_one_fault_in_a_row_and_pays_for_the_last_valid_guess() -> None:
    played = game("adopt", style="textarena", reward="textarena")
    played.step({"message": "[adapt]"})
    assert not played.step({"message": "no brackets"}).done
    played.step({"message": "[crane]"})
    assert not played.step({"message": "[crane]"}).done
    end = played.step({"message": "[zzzzz]"})
    assert end.done
    assert end.reward == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["binary", "partial"])
def test_breaking_the_rules_never_pays(kind: str) -> None:
    played = game("adopt", reward=kind, invalid_budget=1)
    played.step({"message": "[adapt]"})
    assert not played.step({"message": "[adapt]"}).done
    end = played.step({"message": "[adapt]"})
    assert end.done
    assert end.reward == 0.0
    assert end.metrics["repeats"] == 2.0


def test_partial_pays_for_the_last_guess_of_a_game_played_to_its_end() -> None:
    played = game("adopt", reward="partial", max_turns=2)
    played.step({"guess": "crane"})
    assert played.step({"guess": "adapt"}).reward == pytest.approx(0.8)


def graded(message: str, secret: str = "crown", earlier: tuple[str, ...] = ()) -> float:
    return grade(
        message,
        secret=secret,
        earlier=earlier,
        lexicon=Lexicon(WORDS.allowed - {"crane"}),
        hinted=True,
        weights=GradeWeights(),
    )


def test_the_graded_reward_climbs_from_form_to_hint_to_word_to_letters() -> None:
    ladder = [
        "crowd",
        "[cr",
        "[abc] ...",
        "[ab]",
        "[xbxxx]",
        "[cxxxx]",
        "[crxxx]",
        "[croxx]",
        "[crowx]",
        "[cabin]",
        "[crowd]",
    ]
    points = [graded(message) for message in ladder]
    assert points == sorted(points)
    assert points[1] == 0.0 and len(set(points[1:])) == len(points) - 1
    assert graded("[crown]") == pytest.approx(1.0)


def test_the_graded_reward_pays_neither_for_the_example_nor_for_a_repeat_nor_for_many_words() -> (
    None
):
    assert graded("[crane]") == pytest.approx(0.35 + 0.25 * 3 / 4)
    assert graded("[crowd]", earlier=("crowd",)) == 0.0
    assert graded("[crowd] [cabin]") == 0.0
    assert graded("[brown]") == pytest.approx(0.2)


def test_the_hint_style_tells_the_first_letter_and_a_job_may_replace_any_line() -> None:
    world = GuessWorld(GuessConfig(style="hint", max_turns=2, texts={"system": "Play."}), WORDS)
    _, first = world.start(Task(index=0), random.Random(0))
    letter = WORDS.secrets["train"][0][0]
    assert [m["role"] for m in first.messages] == ["system", "user", "assistant", "user"]
    assert first.messages[0]["content"] == "Play."
    assert first.messages[-1]["content"] == f"It starts with {letter}. Guess."
    with pytest.raises(ValueError, match="wording"):
        GuessConfig(texts={"wording": "no such line"})


@given(
    st.lists(st.sampled_from(["[crane]", "[slate]", "", "[", "[toolong]", "[ADOPT]"]), max_size=6)
)
def test_nothing_shown_before_the_end_holds_the_secret(messages: list[str]) -> None:
    played = game("adopt", reward="graded", invalid_budget=None)
    for message in messages:
        reply = played.step({"message": message})
        if reply.done:
            return
        shown = json.dumps([reply.observation(), played.state()]).lower()
        assert "adopt" not in shown


def test_an_action_without_a_word_field_is_the_clients_fault() -> None:
    with pytest.raises(BadAction, match="guess"):
        game("adopt").step({"letters": "adopt"})
