"""Rollouts that ended in an error: how many, and what it mostly was."""

from collections import Counter
from collections.abc import Iterable

from deltawire.protocol.rollouts import Rollout

_SHOWN = 200
"""Characters of a reason that are kept."""
_KIND_PARTS = 2
"""Of "picky: ValueError: bad 'x' (job.py:3)", what comes after these differs from sample to
sample."""


class ErrorTally:
    """Counts errors by their kind, with one example of each."""

    def __init__(self, rollouts: Iterable[Rollout] = ()) -> None:
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self.add(rollouts)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Count those among them whose status is `error`."""
        for rollout in rollouts:
            if rollout.status == "error":
                self._count(rollout.reason or "no reason given")

    @property
    def total(self) -> int:
        """Rollouts counted."""
        return self._kinds.total()

    @property
    def reason(self) -> str:
        """An example of the most frequent kind; "" when there was no error."""
        most = self._kinds.most_common(1)
        return self._examples[most[0][0]] if most else ""

    def _count(self, reason: str) -> None:
        kind = ": ".join(reason.split(": ")[:_KIND_PARTS])[:_SHOWN]
        self._kinds[kind] += 1
        self._examples.setdefault(kind, reason[:_SHOWN])
