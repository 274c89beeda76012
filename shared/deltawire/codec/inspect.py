"""What a delta file changes, tensor by tensor, for people: counts, density, how far weights moved.

A compact file holds its steps whether or not the base is at hand: decoded against any constant,
the distances come out right. What comes out otherwise against another constant was stored whole,
mostly because it moved far. A seed file holds no distances, and a classes file cannot be placed
without its base: give `old` for those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.kernels_numpy import ordered
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.codec.values import MAX_STEP_BYTES
from deltawire.protocol.errors import LayoutMismatch

STEP_BOUNDS = (1, 2, 4, 8, 16, 254)
"""Upper bounds of the histogram's bars, in units in the last place; the last bar is beyond, or
stored whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChanges:
    """One tensor's part of a delta, in numbers."""

    name: str
    changed: int
    elements: int
    steps: tuple[int, ...] | None
    """Changes by distance, one more bar than STEP_BOUNDS; None when the file does not say."""

    @property
    def density(self) -> float:
        """Share of the tensor that changed."""
        return self.changed / self.elements


def inspect_delta(path: Path, layout: Layout, old: OldValues | None = None) -> list[TensorChanges]:
    """Every tensor that a delta changes, in layout order. Raises what ``decode_delta`` raises."""
    encoding = read_header(path).encoding
    if encoding == "classes" and old is None:
        raise LayoutMismatch(f"{path.name}: a classes file cannot be placed without its base")
    if old is not None or encoding != "compact":
        return [_counted(patch, layout, None) for patch in decode_delta(path, layout, old)]
    once, again = (decode_delta(path, layout, _Constant(layout, up)) for up in (0, 1))
    return [_counted(patch, layout, other) for patch, other in zip(once, again, strict=True)]


def histogram(tensors: Sequence[TensorChanges]) -> tuple[int, ...] | None:
    """The bars of all tensors together; None when any is unknown."""
    known = [tensor.steps for tensor in tensors if tensor.steps is not None]
    if len(known) != len(tensors) or not known:
        return None
    return tuple(sum(bars) for bars in zip(*known, strict=True))


def _counted(patch: SparsePatch, layout: Layout, other: SparsePatch | None) -> TensorChanges:
    steps: tuple[int, ...] | None = None
    if patch.old is not None and patch.values.itemsize <= MAX_STEP_BYTES:
        moved = _moved(patch)
        distance = np.abs(moved)
        if other is not None:
            distance[moved != _moved(other)] = STEP_BOUNDS[-1] + 1
        bars = np.bincount(np.searchsorted(STEP_BOUNDS, distance), minlength=len(STEP_BOUNDS) + 1)
        steps = tuple(bars.tolist())
    return TensorChanges(
        name=patch.name, changed=patch.changed, elements=layout[patch.name].numel, steps=steps
    )


def _moved(patch: SparsePatch) -> IndexArray:
    """Units on the line of floats."""
    assert patch.old is not None  # given, or decoded against a constant
    return ordered(patch.values) - ordered(patch.old)


class _Constant:
    """A base of one pattern everywhere, far from both ends of the line."""

    def __init__(self, layout: Layout, up: int) -> None:
        self._layout, self._up = layout, up

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        """See OldValues."""
        return self.read(name, 0, indices.size)

    def read(self, name: str, begin: int, end: int) -> BitArray:
        """See OldValues."""
        bits = self._layout[name].bits
        pattern = (1 << (8 * bits.itemsize - 2)) + self._up
        return np.full(end - begin, pattern, bits)
