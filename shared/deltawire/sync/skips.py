"""Skip files: several deltas merged into one, for replicas that are behind.

A merge keeps the first old value and the last new one of every element, and drops elements that
came back to where they were. Eight steps weigh about half of their eight deltas, and one object
costs one round trip instead of eight.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from deltawire.codec.encode import Encoding, encode_delta
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import LayoutMismatch
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.upload import upload_object


def merged(deltas: Iterable[Sequence[SparsePatch]], layout: Layout) -> list[SparsePatch]:
    """Consecutive deltas as one, in layout order. Patches must carry `old`."""
    found: dict[str, SparsePatch] = {}
    for patches in deltas:
        for patch in patches:
            before = found.get(patch.name)
            found[patch.name] = patch if before is None else composed(before, patch)
    moved = (without_returns(found[name]) for name in layout if name in found)
    return [patch for patch in moved if patch.changed]


def composed(first: SparsePatch, second: SparsePatch) -> SparsePatch:
    """One tensor's two patches after each other: first old, last new."""
    if first.old is None or second.old is None:
        raise LayoutMismatch(f"{first.name}: no old values; a merge needs them")
    indices = np.union1d(first.indices, second.indices).astype(first.indices.dtype)
    at_first = np.searchsorted(indices, first.indices)
    at_second = np.searchsorted(indices, second.indices)
    values = np.empty(indices.size, first.values.dtype)
    old = np.empty(indices.size, first.values.dtype)
    old[at_second] = second.old
    old[at_first] = first.old  # written last: the older wins
    values[at_first] = first.values
    values[at_second] = second.values  # written last: the newer wins
    return SparsePatch(name=first.name, indices=indices, values=values, old=old)


def without_returns(patch: SparsePatch) -> SparsePatch:
    """The patch without elements whose new value is their old one."""
    assert patch.old is not None  # composed has seen to it
    moved = patch.values != patch.old
    return SparsePatch(
        name=patch.name,
        indices=patch.indices[moved],
        values=patch.values[moved],
        old=patch.old[moved],
    )


class RecentDeltas:
    """The patches of the last versions, for the skip files that end at the newest one."""

    def __init__(self, levels: Sequence[int]) -> None:
        if any(level < 2 for level in levels):
            raise ValueError(f"a skip file spans at least 2 versions, got {list(levels)}")
        self._levels = sorted(levels)
        self._recent: deque[tuple[int, list[SparsePatch]]] = deque(maxlen=max(levels, default=0))

    def add(self, version: int, patches: list[SparsePatch]) -> list[list[list[SparsePatch]]]:
        """Note a committed version; returns the runs of deltas to merge now, one for each level
        that ends here."""
        if self._recent and self._recent[-1][0] != version - 1:
            self._recent.clear()
        self._recent.append((version, patches))
        return [
            [delta for _, delta in list(self._recent)[-level:]]
            for level in self._levels
            if version % level == 0 and len(self._recent) >= level
        ]


def upload_skip(
    store: Store,
    deltas: Sequence[Sequence[SparsePatch]],
    *,
    layout: Layout,
    run_id: str,
    version: PolicyVersion,
    base_digest: str,
    new_digest: str,
    encoding: Encoding,
    epoch: int,
    folder: Path,
) -> Link:
    """Merge the deltas that end at `version` and upload them under a skip key."""
    header = ObjectHeader(
        sparse=True,
        model_version=version,
        base_version=PolicyVersion(version - len(deltas)),
        run_id=run_id,
        base_digest=base_digest,
        new_digest=new_digest,
    )
    path = folder / "skip.safetensors"
    written = encode_delta(
        merged(deltas, layout),
        header,
        path,
        layout=layout,
        encoding="seed" if encoding == "seed" else "compact",
    )
    return upload_object(store, path, written.header, kind=ObjectKind.SKIP, epoch=epoch)
