"""Tokens made: in total, and a second over the last moments."""

import threading
import time
from collections import deque

_WINDOW_S = 10.0


class TokenRate:
    """Written by the engine's thread, read by others."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> None:
        """A step made this many."""
        with self._lock:
            self.total += tokens
            self._recent.append((time.monotonic(), tokens))
            self._prune()

    def per_s(self) -> float:
        """Mean over the last ten seconds."""
        with self._lock:
            self._prune()
            if not self._recent:
                return 0.0
            span_s = max(1.0, time.monotonic() - self._recent[0][0])
            return sum(tokens for _, tokens in self._recent) / span_s

    def _prune(self) -> None:
        oldest = time.monotonic() - _WINDOW_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
