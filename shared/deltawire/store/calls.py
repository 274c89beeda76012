"""Counts the calls a store made in its rate window, for the budget it shows in a status."""

import threading
import time
from collections import deque
from collections.abc import Callable

from deltawire.store.base import StoreBudget

WINDOW_S = 300.0
"""The Hub counts calls over five minutes; the others are shown in the same window."""


class CallCounter:
    """Thread-safe. Remembers when each call of the last window was made."""

    def __init__(
        self, *, allowed: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowed = allowed
        self._clock = clock
        self._made_at: deque[float] = deque()
        self._lock = threading.Lock()

    def add(self, calls: int = 1) -> None:
        """Note calls made now."""
        with self._lock:
            now = self._forget_old()
            self._made_at.extend([now] * calls)

    def budget(self) -> StoreBudget:
        """What was used of what is allowed."""
        with self._lock:
            self._forget_old()
            return StoreBudget(calls=len(self._made_at), window_s=WINDOW_S, allowed=self._allowed)

    def _forget_old(self) -> float:
        now = self._clock()
        while self._made_at and self._made_at[0] <= now - WINDOW_S:
            self._made_at.popleft()
        return now
