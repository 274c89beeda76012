"""Which objects lead on: the cheapest route past those that were refused.

When a route of several objects is refused, its first object is tried alone, then the next: so the
bad one ends up alone and is the one to blame. What was refused is remembered by key and sha256: the
same bytes stay wrong, and an object that latest.json gives another sha256 is tried again.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from deltawire.protocol.chain import Head, Link, plan_route
from deltawire.protocol.errors import VersionGap
from deltawire.protocol.versions import PolicyVersion

_FETCHES_ALLOWED = 3
"""A file that arrives damaged may be whole the next time; after this often it is the bucket's."""


class Routing:
    """A replica's memory of the objects it met."""

    def __init__(self) -> None:
        self.rejected_total = 0
        self._refused: set[tuple[str, str]] = set()
        self._damaged: Counter[tuple[str, str]] = Counter()
        self._one_by_one = False

    def plan(self, head: Head, *, have: PolicyVersion | None) -> list[Link]:
        """To the newest version that usable objects lead to. VersionGap when there is none."""
        links = [link for link in head.links if _name(link) not in self._refused]
        newer = {link.version for link in links if have is None or link.version > have}
        for want in sorted(newer, reverse=True):
            with suppress(VersionGap):
                route = plan_route(links, have=have, want=want)
                return route[:1] if self._one_by_one else route
        raise VersionGap(have=have, want=head.version)

    def arrived(self) -> None:
        """A route was good to its end."""
        self._one_by_one = False

    def suspect(self, route: Sequence[Link]) -> Link | None:
        """A route was refused: the object to blame, or None when it is not known yet."""
        if len(route) > 1:
            self._one_by_one = True
            return None
        return route[0]

    def refuse(self, link: Link) -> None:
        """Never try this object again."""
        self.rejected_total += 1
        self._refused.add(_name(link))

    def damaged(self, route: Sequence[Link], key: str) -> None:
        """An object's file did not have its sha256; refused when that happens too often.

        `key` may begin with the run's folder.
        """
        for link in route:
            if any(key.endswith(file) for file in (link.key, *(s.key for s in link.shards))):
                self._damaged[_name(link)] += 1
                if self._damaged[_name(link)] == _FETCHES_ALLOWED:
                    self.refuse(link)


def _name(link: Link) -> tuple[str, str]:
    return link.key, link.sha256
