"""What a producer waits for right now, so that "who is the bottleneck" has an answer."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Reason = Literal["tickets", "environment", "engine", "weights"]


class Waits:
    """Counts who waits for what. Not thread-safe: one event loop."""

    def __init__(self) -> None:
        self._waiting: Counter[Reason] = Counter()

    @contextmanager
    def on(self, reason: Reason) -> Iterator[None]:
        """Count one waiter while the block runs."""
        self._waiting[reason] += 1
        try:
            yield
        finally:
            self._waiting[reason] -= 1

    @property
    def most(self) -> Reason | Literal[""]:
        """What most wait for. Tickets count only while nothing else is under way."""
        busy = {r: n for r, n in self._waiting.items() if n > 0 and r != "tickets"}
        if busy:
            return max(busy, key=lambda reason: busy[reason])
        return "tickets" if self._waiting["tickets"] else ""
