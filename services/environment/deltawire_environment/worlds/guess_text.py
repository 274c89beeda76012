"""What the guessing game says. A job may replace any line of it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from deltawire.job.transcript import Message

Style = Literal["plain", "hint", "textarena"]


class GuessTexts(BaseModel):
    """Templates. `{guess}`, `{marks}`, `{left}`, `{turns}`, `{board}` are filled in.

    `{first}` is the secret's first letter: a template that uses it makes an easier game. `{secret}`
    and `{percent}` stand only in `lost`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str = ""
    opening: str
    worked: tuple[tuple[str, str], ...] = ()
    """Worked turns after the opening: (what the player says, what the game answers)."""
    feedback: str
    no_word: str
    wrong_length: str
    repeated: str
    not_a_word: str
    solved: str
    lost: str


_SHORT = {
    "no_word": "Write one word in square brackets.",
    "wrong_length": "It must have five letters.",
    "repeated": "You had that word. Guess another.",
    "not_a_word": "That is not a word. Guess again.",
    "solved": "Solved.",
    "lost": "The word was [{secret}].",
}

TEXTS: dict[Style, GuessTexts] = {
    "plain": GuessTexts(
        opening=(
            "Guess the secret five-letter English word. You have {turns} guesses. Answer with one "
            "word in square brackets, like [crane]. After each guess every letter is marked: G "
            "right letter and place, Y right letter in another place, X not in the word."
        ),
        feedback="{board}\nGuesses left: {left}.",
        **_SHORT,
    ),
    # A worked turn shows a small model the form of an answer; the first letter makes groups ask for
    # different words, so that no single word can win everywhere.
    "hint": GuessTexts(
        system="You play a word game. You answer with one five-letter word in square brackets.",
        opening="It starts with c. Guess.",
        worked=(("[crane]", "It starts with {first}. Guess."),),
        feedback="{guess} {marks}. It starts with {first}. Guess.",
        no_word="No. It starts with {first}. Guess.",
        wrong_length="No. It starts with {first}. Guess.",
        repeated="No. It starts with {first}. Guess.",
        not_a_word="No. It starts with {first}. Guess.",
        solved="Yes.",
        lost="It was [{secret}].",
    ),
    # Word for word what TextArena's players read, so that prompts and policies can move over.
    "textarena": GuessTexts(
        opening=(
            "You are Playing Wordle.\nA secret 5-letter word has been chosen. You have {turns} "
            "attempts to guess it.\nFor each guess, wrap your word in square brackets (e.g., "
            "'[apple]').\nFeedback for each letter will be given as follows:\n"
            "  - G (green): correct letter in the correct position\n"
            "  - Y (yellow): letter exists in the word but in the wrong position\n"
            "  - X (wrong): letter is not in the word\n"
            "Enter your guess to begin.\n"
        ),
        feedback="You submitted [{guess}].\nFeedback:\n{board}\nYou have {left} guesses left.",
        no_word=(
            "You tried submitting a word in the wrong format. Please make sure to use squared "
            "brackets."
        ),
        wrong_length="Your word must be exactly 5 letters.",
        repeated="You have already guessed '{guess}' before. Please try a different word.",
        not_a_word="'{guess}' is not an English word.",
        solved="Congratulations! You guessed the word correctly!",
        lost=(
            "The turn limit has been reached. You didn't guess the word, but your best guess "
            "matched {percent}% of the letters in the correct positions.\nThe secret word was: "
            "**{secret}**."
        ),
    ),
}


def gives_hint(texts: GuessTexts) -> bool:
    """Whether the player is told the first letter before the first guess."""
    return "{first}" in texts.opening + "".join(answer for _, answer in texts.worked)


def opening_chat(texts: GuessTexts, *, turns: int, first: str) -> list[Message]:
    """The first messages: a system line, the opening and the worked turns."""
    chat = [Message(role="system", content=texts.system)] if texts.system else []
    chat.append(Message(role="user", content=texts.opening.format(turns=turns, first=first)))
    for said, answered in texts.worked:
        chat.append(Message(role="assistant", content=said))
        chat.append(Message(role="user", content=answered.format(turns=turns, first=first)))
    return chat


def board(guess: str, signs: str) -> str:
    """`C R A N E` over `X X Y X X`."""
    return f"{' '.join(guess.upper())}\n{' '.join(signs)}"
