"""One deadline, carried through everything an episode waits for."""

import time
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock. Waiting for a part never gets a fresh full timeout."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """`seconds` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left; 0.0 when it has passed."""
        return max(0.0, self.at_s - time.monotonic())

    def within(self, seconds: float) -> float:
        """At most `seconds`, and never beyond the deadline."""
        return min(seconds, self.left_s)
