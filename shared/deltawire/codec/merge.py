"""Several deltas as one, for replicas that are behind: first old, last new, returns dropped.

Merging k deltas of one run keeps about k^0.7 times one delta's changes; what came back to its old
value is no change at all. The result is what ``Shadow.diff`` would have given from the first base
to the last version.
"""

from collections.abc import Sequence

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.errors import LayoutMismatch


def merge_deltas(deltas: Sequence[Sequence[SparsePatch]], layout: Layout) -> list[SparsePatch]:
    """Compose deltas that follow each other, oldest first. All must carry old values.

    Raises LayoutMismatch where a delta's old values are not what the one before it left.
    """
    by_name: dict[str, list[SparsePatch]] = {}
    for delta in deltas:
        for patch in delta:
            by_name.setdefault(patch.name, []).append(patch)
    merged = [_merge(by_name[name]) for name in layout if name in by_name]
    return [patch for patch in merged if patch.changed]


def _merge(patches: Sequence[SparsePatch]) -> SparsePatch:
    """Pairwise, so that each element is moved log2(k) times."""
    row = list(patches)
    while len(row) > 1:
        pairs = [row[k : k + 2] for k in range(0, len(row), 2)]
        row = [compose(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return _without_returns(row[0])


def compose(first: SparsePatch, second: SparsePatch) -> SparsePatch:
    """Both after each other, returns still in it. Raises LayoutMismatch when they do not fit."""
    first_old, second_old = _old(first), _old(second)
    indices = _union(first.indices, second.indices)
    in_first = np.searchsorted(indices, first.indices)
    in_second = np.searchsorted(indices, second.indices)
    values = np.empty(indices.size, first.values.dtype)
    values[in_first] = first.values
    held = np.zeros(indices.size, bool)
    held[in_first] = True
    again = held[in_second]
    if not np.array_equal(values[in_second[again]], second_old[again]):
        raise LayoutMismatch(f"{first.name}: the second delta is not based on the first")
    values[in_second] = second.values
    old = np.empty_like(values)
    old[in_second] = second_old
    old[in_first] = first_old
    return SparsePatch(name=first.name, indices=indices, values=values, old=old)


def _union(a: IndexArray, b: IndexArray) -> IndexArray:
    """Sorted positions of either. A stable sort of two runs is one merge pass."""
    both = np.sort(np.concatenate([a, b]), kind="stable")
    first = np.ones(both.size, bool)
    np.not_equal(both[1:], both[:-1], out=first[1:])
    union: IndexArray = both[first]
    return union


def _without_returns(patch: SparsePatch) -> SparsePatch:
    moved = patch.values != _old(patch)
    return SparsePatch(
        name=patch.name,
        indices=patch.indices[moved],
        values=patch.values[moved],
        old=_old(patch)[moved],
    )


def _old(patch: SparsePatch) -> BitArray:
    if patch.old is None:
        raise LayoutMismatch(f"{patch.name}: no old values; gather them before merging")
    return patch.old
