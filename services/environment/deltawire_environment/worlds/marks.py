"""The marks of a guess: G right letter and place, Y right letter elsewhere, X neither."""


def marks(secret: str, guess: str) -> str:
    """One of G, Y, X for each letter. A letter of the secret answers for one letter of the guess.

    Greens first, then yellows from left to right. Example: ``marks("abbey", "babes") == "YYGGX"``.
    """
    signs = ["G" if g == s else "X" for g, s in zip(guess, secret, strict=True)]
    free = [s for g, s in zip(guess, secret, strict=True) if g != s]
    for at, letter in enumerate(guess):
        if signs[at] == "X" and letter in free:
            signs[at] = "Y"
            free.remove(letter)
    return "".join(signs)


def closeness(signs: str) -> float:
    """Greens, and yellows as halves, as a share of the word. 1.0 is solved."""
    return (signs.count("G") + 0.5 * signs.count("Y")) / len(signs)
