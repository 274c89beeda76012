"""Back-off as a pure function: from the number of failed attempts to the seconds to wait."""

import random


def backoff_s(
    attempt: int, *, first_s: float = 0.05, longest_s: float = 5.0, rng: random.Random | None = None
) -> float:
    """Seconds before attempt `attempt` + 1: doubling from `first_s`, at most `longest_s`.

    Half of it is random, so that many clients do not come back in step ("equal jitter").
    """
    whole_s = min(longest_s, first_s * 2.0 ** min(attempt, 32))
    draw = rng.random() if rng is not None else random.random()
    return whole_s * (0.5 + 0.5 * draw)
