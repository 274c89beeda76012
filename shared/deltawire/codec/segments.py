"""Segments: the stretches of a run's element order that are coded each on their own.

The layout fixes *units*: whole tensors of one dtype up to 2^24 elements together, a bigger tensor
in pieces of 2^24. A segment is one unit or several neighbours of the same dtype, so every reader
knows where one may begin and end. The writer joins sparse units until a segment has enough changes
to pay for its entropy tables.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray, bits_type
from deltawire.codec.patch import Layout, OldValues, SparsePatch, TensorLayout

UNIT_ELEMENTS = 1 << 24
ENOUGH_CHANGES = 1 << 17
MAX_SEGMENT_ELEMENTS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements [begin, end) of the run's element order, all of one dtype."""

    begin: int
    end: int
    dtype: str

    @property
    def span(self) -> int:
        """Elements in it."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What changed in one segment."""

    segment: Segment
    positions: IndexArray
    """int64 [m], counted from the segment's begin."""
    values: BitArray
    old: BitArray | None


def units_of(layout: Layout) -> list[Segment]:
    """The units of a layout, in order. Together they cover every element once."""
    units: list[Segment] = []
    open_unit: Segment | None = None
    for tensor in layout.values():
        end = tensor.offset + tensor.numel
        fits = (
            open_unit is not None
            and open_unit.dtype == tensor.dtype
            and end - open_unit.begin <= UNIT_ELEMENTS
        )
        if open_unit is not None and fits:
            open_unit = Segment(begin=open_unit.begin, end=end, dtype=tensor.dtype)
            continue
        if open_unit is not None:
            units.append(open_unit)
        begin = tensor.offset
        while end - begin > UNIT_ELEMENTS:
            units.append(Segment(begin=begin, end=begin + UNIT_ELEMENTS, dtype=tensor.dtype))
            begin += UNIT_ELEMENTS
        open_unit = Segment(begin=begin, end=end, dtype=tensor.dtype)
    if open_unit is not None:
        units.append(open_unit)
    return [unit for unit in units if unit.span]


def segmented(patches: Sequence[SparsePatch], layout: Layout) -> list[Changes]:
    """The changes, segment by segment. Segments without any are left out."""
    pieces = _Pieces(patches, layout)
    found: list[Changes] = []
    held: Segment | None = None
    count = 0
    for unit in units_of(layout):
        more = pieces.count(unit)
        joins = (
            held is not None
            and held.dtype == unit.dtype
            and held.end == unit.begin
            and count + more <= ENOUGH_CHANGES
            and unit.end - held.begin < MAX_SEGMENT_ELEMENTS
        )
        if held is not None and joins:
            held, count = Segment(begin=held.begin, end=unit.end, dtype=unit.dtype), count + more
            continue
        if held is not None and count:
            found.append(pieces.changes(held))
        held, count = unit, more
    if held is not None and count:
        found.append(pieces.changes(held))
    return found


def patches_of(changes: Iterable[Changes], layout: Layout) -> list[SparsePatch]:
    """The inverse of ``segmented``: changes in order, back to one patch a tensor."""
    pieces: dict[str, list[SparsePatch]] = {}
    for part in changes:
        for tensor, here in spread(part.segment, part.positions, layout):
            local = part.positions[here] + (part.segment.begin - tensor.offset)
            piece = SparsePatch(
                name=tensor.name,
                indices=local.astype(tensor.index_type),
                values=part.values[here],
                old=None if part.old is None else part.old[here],
            )
            pieces.setdefault(tensor.name, []).append(piece)
    return [_joined(parts) for parts in pieces.values()]


def spread(
    segment: Segment, positions: IndexArray, layout: Layout
) -> Iterator[tuple[TensorLayout, slice]]:
    """The tensors that sorted positions of a segment fall into, and which of them."""
    inside = list(layout.between(segment.begin, segment.end))
    ends = [tensor.offset + end - segment.begin for tensor, _, end in inside]
    cuts = np.searchsorted(positions, ends).tolist()
    low = 0
    for (tensor, _, _), high in zip(inside, cuts, strict=True):
        if high > low:
            yield tensor, slice(low, high)
        low = high


def gather_old(segment: Segment, positions: IndexArray, layout: Layout, old: OldValues) -> BitArray:
    """The old values at sorted positions of a segment."""
    found = [
        old.gather(t.name, (positions[here] + (segment.begin - t.offset)).astype(t.index_type))
        for t, here in spread(segment, positions, layout)
    ]
    return np.concatenate(found) if found else np.empty(0, bits_type(segment.dtype))


class _Pieces:
    """Patches by name, counted and cut at segment borders."""

    def __init__(self, patches: Sequence[SparsePatch], layout: Layout) -> None:
        self._patches = {patch.name: patch for patch in patches}
        self._layout = layout

    def count(self, segment: Segment) -> int:
        """Changes in it."""
        return sum(here.stop - here.start for _, _, here in self._within(segment))

    def changes(self, segment: Segment) -> Changes:
        """All of them. At least one."""
        pieces = list(self._within(segment))
        old = [patch.old[here] for _, patch, here in pieces if patch.old is not None]
        return Changes(
            segment=segment,
            positions=np.concatenate(
                [
                    patch.indices[here].astype(np.int64) + (tensor.offset - segment.begin)
                    for tensor, patch, here in pieces
                ]
            ),
            values=np.concatenate([patch.values[here] for _, patch, here in pieces]),
            old=np.concatenate(old) if len(old) == len(pieces) else None,
        )

    def _within(self, segment: Segment) -> Iterator[tuple[TensorLayout, SparsePatch, slice]]:
        for tensor, first, end in self._layout.between(segment.begin, segment.end):
            patch = self._patches.get(tensor.name)
            if patch is None:
                continue
            if first == 0 and end == tensor.numel:
                here = slice(0, patch.changed)
            else:
                low, high = np.searchsorted(patch.indices, [first, end]).tolist()
                here = slice(low, high)
            if here.stop > here.start:
                yield tensor, patch, here


def _joined(parts: list[SparsePatch]) -> SparsePatch:
    if len(parts) == 1:
        return parts[0]
    old = [part.old for part in parts if part.old is not None]
    return SparsePatch(
        name=parts[0].name,
        indices=np.concatenate([part.indices for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        old=np.concatenate(old) if len(old) == len(parts) else None,
    )
