"""A route of fetched objects as one patch list against the weights that are live.

Several deltas become one: the first old value and the last new one of each element that moved. The
live weights are read, never written; each object's digests are checked on the way.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deltawire.codec.anchor import iter_anchor
from deltawire.codec.bits import BitArray, IndexArray
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.digest import Digest, check_digests, digest_full
from deltawire.codec.merge import compose, merge_deltas
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import DigestMismatch, MalformedObject
from deltawire.protocol.layout import ObjectKind
from deltawire.sync.replay import by_link, check_header

Objects = Sequence[tuple[Link, Path]]


class PatchedValues:
    """Old values of weights with patches on top that are not applied yet."""

    def __init__(self, below: OldValues, layout: Layout) -> None:
        self._below, self._layout = below, layout
        self._patches: dict[str, SparsePatch] = {}

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        """See OldValues."""
        values = self._below.gather(name, indices)
        patch = self._patches.get(name)
        if patch is not None and patch.changed:
            at = np.searchsorted(patch.indices, indices).clip(max=patch.changed - 1)
            hit = patch.indices[at] == indices
            values[hit] = patch.values[at[hit]]
        return values

    def read(self, name: str, begin: int, end: int) -> BitArray:
        """See OldValues."""
        values = self._below.read(name, begin, end)
        patch = self._patches.get(name)
        if patch is None:
            return values
        values = values.copy()
        first, last = np.searchsorted(patch.indices, [begin, end])
        values[patch.indices[first:last] - begin] = patch.values[first:last]
        return values

    def add(self, patches: Sequence[SparsePatch]) -> None:
        """Lay patches on top; each carries the values it found here as `old`."""
        for patch in patches:
            below = self._patches.get(patch.name)
            self._patches[patch.name] = patch if below is None else compose(below, patch)

    def patches(self) -> list[SparsePatch]:
        """All of it as one list in layout order; elements that came back to where they were go."""
        return merge_deltas([list(self._patches.values())], self._layout)


def read_route(
    objects: Objects, *, run_id: str, layout: Layout, live: OldValues, held: Digest
) -> tuple[list[SparsePatch], Digest]:
    """The patches that lead from the live weights to the route's end, and the digest there.

    Raises WeightsError children; DigestMismatch when the route does not start where we stand.
    """
    values = PatchedValues(live, layout)
    digest = held
    for link, paths in by_link(objects):
        headers = [read_header(path) for path in paths]
        for header in headers:
            check_header(header, link, run_id=run_id, layout=layout, name=link.key)
        if link.kind is ObjectKind.ANCHOR:
            values, digest = _anchor(paths, layout=layout, live=live)
        elif len(paths) != 1:
            raise MalformedObject(f"{link.key}: a delta is one file, {len(paths)} were given")
        else:
            patches = decode_delta(paths[0], layout=layout, old=values)
            digest = check_digests(headers[0], patches, layout, held=digest, name=link.key)
            values.add(patches)
        if str(digest) != link.new_digest:
            raise DigestMismatch(link.key, expected=link.new_digest, actual=str(digest))
    return values.patches(), digest


def _anchor(
    paths: Sequence[Path], *, layout: Layout, live: OldValues
) -> tuple[PatchedValues, Digest]:
    """What differs from the live weights; they need not be right."""
    values = PatchedValues(live, layout)
    digest = digest_full(iter_anchor(paths, layout=layout), layout)
    for name, bits in iter_anchor(paths, layout=layout):
        now = live.read(name, 0, bits.size)
        indices = np.flatnonzero(bits != now).astype(layout[name].index_type)
        values.add(
            [SparsePatch(name=name, indices=indices, values=bits[indices], old=now[indices])]
        )
    return values, digest
