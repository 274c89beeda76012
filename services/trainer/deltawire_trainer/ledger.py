"""Where every group went: issued = trained + open + dropped + lost, by id.

Pure accounting. The journal replays its events into it after a restart, so the counts are those of
the run and not of the process.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from deltawire.protocol.control import GroupCounts

Fate = Literal["unknown", "open", "trained", "dropped"]


class Ledger:
    """Every ticket id has exactly one fate; a group is trained at most once."""

    def __init__(self) -> None:
        self._issued: dict[str, None] = {}
        self._trained: dict[str, int] = {}
        self._dropped: dict[str, str] = {}
        self._doubled = 0
        self._lost = 0

    def issue(self, ids: Iterable[str]) -> None:
        """Tickets go out. Issuing an id again changes nothing."""
        self._issued.update(dict.fromkeys(ids))

    def adopt(self, group_id: str) -> None:
        """A group whose ticket an earlier trainer of this run had issued."""
        self._issued.setdefault(group_id)

    def train(self, ids: Iterable[str], *, step: int) -> None:
        """An optimizer step used these groups."""
        for group_id in ids:
            if group_id in self._trained:
                self._doubled += 1
            self._trained[group_id] = step

    def drop(self, group_id: str, reason: str) -> None:
        """A group was left out on purpose."""
        self._dropped[group_id] = reason

    def close(self) -> int:
        """The run is over: whatever is still open is lost. Returns how many."""
        self._lost = self.open
        return self._lost

    def fate(self, group_id: str) -> Fate:
        """What became of a group so far."""
        if group_id in self._trained:
            return "trained"
        if group_id in self._dropped:
            return "dropped"
        return "open" if group_id in self._issued else "unknown"

    def open_ids(self) -> list[str]:
        """Issued, and neither trained nor dropped, in order of issue."""
        return [group_id for group_id in self._issued if self.fate(group_id) == "open"]

    @property
    def issued(self) -> int:
        """Tickets ever issued."""
        return len(self._issued)

    @property
    def open(self) -> int:
        """Tickets and groups still under way."""
        settled = len(self._trained) + len(self._dropped) + self._lost
        return max(0, len(self._issued) - settled)

    def counts(self) -> GroupCounts:
        """The account."""
        return GroupCounts(
            issued=len(self._issued),
            trained=len(self._trained),
            open=self.open,
            dropped=dict(Counter(self._dropped.values())),
            lost=self._lost,
            doubled=self._doubled,
        )
