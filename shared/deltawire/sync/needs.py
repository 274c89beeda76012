"""Who needs a link: which replicas would take it on their way to the newest version. Pure."""

from collections.abc import Iterable

from deltawire.protocol.chain import Head, Link, plan_route
from deltawire.protocol.errors import VersionGap

Have = int | None
"""A version held; None for a replica that holds nothing."""


def needed_by(head: Head) -> dict[str, list[Have]]:
    """Key of every link -> the versions from which the cheapest route takes it, rising.

    Every route is planned as a replica would plan it. Quick for hundreds of links.
    """
    versions = sorted({link.version for link in head.links} | _bases(head.links))
    found: dict[str, list[Have]] = {link.key: [] for link in head.links}
    for have in (None, *versions):
        try:
            route = plan_route(head.links, have=have, want=head.version)
        except VersionGap:
            continue
        for link in route:
            found[link.key].append(have)
    return found


def in_words(haves: Iterable[Have]) -> str:
    """``[None, 3, 4, 5, 8] -> "joiners, 3-5, 8"``; a dash for nobody."""
    words, runs = [], list[list[int]]()
    for have in haves:
        if have is None:
            words.append("joiners")
        elif runs and have == runs[-1][1] + 1:
            runs[-1][1] = have
        else:
            runs.append([have, have])
    words += [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words) or "-"


def _bases(links: Iterable[Link]) -> set[int]:
    return {link.base_version for link in links if link.base_version is not None}
