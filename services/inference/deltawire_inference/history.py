"""What a replica applied, and what it refused and will not try again."""

from collections import deque

from deltawire.protocol.chain import Link
from deltawire.protocol.control import AppliedUpdate

_UPDATES_KEPT = 50
_FETCHES_ALLOWED = 3
"""A file that arrives damaged may be whole the next time; after this often it is the bucket's."""


class UpdateHistory:
    """The newest updates, oldest first, and their number."""

    def __init__(self) -> None:
        self.newest: deque[AppliedUpdate] = deque(maxlen=_UPDATES_KEPT)
        self.total = 0

    def add(self, update: AppliedUpdate) -> None:
        """One more version is live."""
        self.newest.append(update)
        self.total += 1


class Rejections:
    """Links that were refused, by key and sha256: the same bytes stay wrong.

    A link whose object was replaced in latest.json has another sha256 and is tried again.
    """

    def __init__(self) -> None:
        self.total = 0
        self._refused: set[tuple[str, str]] = set()
        self._damaged: dict[tuple[str, str], int] = {}

    def refuse(self, link: Link) -> None:
        """Never try this object again."""
        self.total += 1
        self._refused.add((link.key, link.sha256))

    def damaged(self, link: Link) -> None:
        """It arrived damaged; refused when that happens too often."""
        where = (link.key, link.sha256)
        self._damaged[where] = self._damaged.get(where, 0) + 1
        if self._damaged[where] == _FETCHES_ALLOWED:
            self.refuse(link)

    def usable(self, links: list[Link]) -> list[Link]:
        """Those that were not refused, in their order."""
        return [link for link in links if (link.key, link.sha256) not in self._refused]
