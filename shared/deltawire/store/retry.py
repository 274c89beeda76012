"""Back-off as a pure function, and the one loop that uses it."""

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltawire.protocol.errors import StoreUnavailable

BASE_DELAY_S = 0.5
"""The first wait is at most this long."""
MAX_DELAY_S = 30.0
"""No wait is longer than this, however often a call failed."""
ATTEMPTS = 6
"""Calls made in all before the store counts as unavailable; about a minute of waiting."""

_Result = TypeVar("_Result")


def backoff_s(attempt: int, *, jitter: float, asked_s: float | None = None) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 0); jitter is in [0, 1].

    Exponential with "full jitter": many replicas that failed together do not come back together.
    Never less than the server asked for (Retry-After), which is capped too.
    """
    ceiling = min(MAX_DELAY_S, BASE_DELAY_S * 2.0 ** min(attempt, 32))
    return max(jitter * ceiling, min(asked_s or 0.0, MAX_DELAY_S))


def retrying(
    call: Callable[[], _Result],
    *,
    delays_s: Iterator[float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """Repeat `call` while it raises StoreUnavailable; the last failure is the caller's."""
    waits = backoff_delays_s() if delays_s is None else delays_s
    while True:
        try:
            return call()
        except StoreUnavailable:
            wait_s = next(waits, None)
            if wait_s is None:
                raise
            sleep(wait_s)


def backoff_delays_s(attempts: int = ATTEMPTS) -> Iterator[float]:
    """The waits between `attempts` calls."""
    for attempt in range(attempts - 1):
        # Jitter spreads load; it guards nothing.
        yield backoff_s(attempt, jitter=random.random())
