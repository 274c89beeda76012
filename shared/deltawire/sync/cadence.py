"""When to write an anchor. Pure: from the links of the chain to yes or no.

The rule weighs what laggards and joiners download (an anchor plus the deltas after it) against
what the trainer uploads. With d bytes a delta, A bytes an anchor and L joiners a step the cheapest
spacing is sqrt(2A / (L d)) versions; L is not known, so the adaptive rule bounds the replay
instead: an anchor is due when the deltas since the last one weigh half an anchor, or are many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltawire.protocol.chain import Link
from deltawire.protocol.layout import ObjectKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Fixed when `every` is given, else adaptive."""

    every: int | None = None
    """Versions between anchors."""
    byte_share: float = 0.5
    """Deltas since the last anchor may weigh this share of it."""
    max_deltas: int = 512
    """And be this many: what a joiner replays, whatever it weighs."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"an anchor every {self.every} versions: expected at least 1")


def anchor_due(links: Sequence[Link], *, version: int, cadence: Cadence) -> bool:
    """Whether `version`, the newest of `links`, should get an anchor beside its delta."""
    anchors = [link for link in links if link.kind is ObjectKind.ANCHOR]
    if not anchors:
        return True
    newest = max(anchors, key=lambda link: link.version)
    if newest.version >= version:
        return False
    if cadence.every is not None:
        return version % cadence.every == 0 or version - newest.version > cadence.every
    since = [
        link for link in links if link.kind is ObjectKind.DELTA and link.version > newest.version
    ]
    weight = sum(link.bytes for link in since)
    return weight > cadence.byte_share * newest.bytes or len(since) > cadence.max_deltas
