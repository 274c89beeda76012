"""Positions among elements of like exponent: what both ends know of the base, used.

A bf16 weight changes when the step passes half a unit in its last place, so the chance halves with
each exponent. Counting a position as a *rank among the elements of its class* (the exponent of the
old value) takes about three bits off every change. Both ends walk the base weights for it, at
memory speed: it pays where the link is slower than that.

A segment's changes are listed class by class. Each class is a *run*: its own shift, its own stretch
of the gap and low streams. Dtypes without a useful exponent are one class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray, IndexArray
from deltawire.codec.patch import Layout, OldValues
from deltawire.codec.positions import (
    MAX_SHIFT,
    low_bytes,
    pack_gaps,
    positions_of,
    shift_of,
    unpack_gaps,
)
from deltawire.codec.segments import Segment
from deltawire.protocol.errors import MalformedObject

CLASSES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The changes of one class in one segment."""

    of_class: int
    shift: int
    changes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassedPositions:
    """The positions of one segment, by class."""

    runs: list[Run]
    quotients: BitArray
    low: BitArray
    order: IndexArray
    """[m] Place in the sorted list of each change in class order."""


def class_field(dtype: str) -> tuple[int, int]:
    """(shift, mask) that takes the class out of an element's bits."""
    fields = {"BF16": (7, 0xFF), "F16": (10, 0x1F), "F32": (23, 0xFF)}
    return fields.get(dtype, (0, 0))


def encode_by_class(
    segment: Segment, positions: IndexArray, layout: Layout, base: OldValues
) -> ClassedPositions:
    """Positions of one segment, against the weights under the delta."""
    seen, last = np.zeros(CLASSES, np.int64), np.full(CLASSES, -1, np.int64)
    classes, gaps = np.empty(positions.size, np.uint8), np.empty(positions.size, np.int64)
    shift, mask = class_field(segment.dtype)
    done = 0
    for tensor, first, end in layout.between(segment.begin, segment.end):
        bits = base.read(tensor.name, first, end)
        begin = tensor.offset + first - segment.begin
        done = kernels.load().class_gaps(
            bits, begin, shift, mask, positions, done, seen, last, classes, gaps
        )
    order = np.argsort(classes, kind="stable")
    counts = np.bincount(classes, minlength=CLASSES)
    runs = [
        Run(of_class=int(c), shift=shift_of(int(counts[c]), int(seen[c])), changes=int(counts[c]))
        for c in np.flatnonzero(counts)
    ]
    packed = [
        pack_gaps(part, run.shift) for run, part in zip(runs, _cut(gaps[order], runs), strict=True)
    ]
    return ClassedPositions(
        runs=runs,
        quotients=np.concatenate([quotients for quotients, _ in packed]),
        low=np.concatenate([low for _, low in packed]),
        order=order,
    )


def decode_by_class(
    segment: Segment,
    runs: Sequence[Run],
    quotients: BitArray,
    low: BitArray,
    layout: Layout,
    base: OldValues,
    *,
    name: str,
) -> tuple[IndexArray, IndexArray]:
    """(sorted positions, place of each in class order). Raises MalformedObject."""
    ranks = _ranks_of(runs, quotients, low, segment.span, name=name)
    cursors, ends = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    ends[[run.of_class for run in runs]] = np.cumsum([run.changes for run in runs])
    cursors[[run.of_class for run in runs]] = ends[[run.of_class for run in runs]] - [
        run.changes for run in runs
    ]
    positions, places = np.empty(ranks.size, np.int64), np.empty(ranks.size, np.int64)
    seen = np.zeros(CLASSES, np.int64)
    shift, mask = class_field(segment.dtype)
    done = 0
    for tensor, first, end in layout.between(segment.begin, segment.end):
        bits = base.read(tensor.name, first, end)
        begin = tensor.offset + first - segment.begin
        done = kernels.load().class_positions(
            bits, begin, shift, mask, ranks, ends, cursors, seen, positions, places, done
        )
    if done != ranks.size:
        raise MalformedObject(f"{name}: {ranks.size - done} changes lie beyond their class")
    return positions, places


def check_runs(runs: Sequence[Run], segment: Segment, changes: int, *, name: str) -> None:
    """Raise MalformedObject unless the runs are in class order and hold all changes."""
    mask = class_field(segment.dtype)[1]
    classes = [run.of_class for run in runs]
    if classes != sorted(set(classes)) or any(not 0 <= c <= mask for c in classes):
        raise MalformedObject(f"{name}: classes {classes[:8]} are not sorted, unique and known")
    if any(run.changes < 1 or not 0 <= run.shift <= MAX_SHIFT for run in runs):
        raise MalformedObject(f"{name}: a class without changes, or a shift above {MAX_SHIFT}")
    if sum(run.changes for run in runs) != changes:
        raise MalformedObject(f"{name}: the classes do not hold the {changes} changes announced")


def _ranks_of(
    runs: Sequence[Run], quotients: BitArray, low: BitArray, span: int, *, name: str
) -> IndexArray:
    """Ranks inside each class, runs one after another."""
    ends = np.flatnonzero(quotients != 255)
    changes = np.cumsum([run.changes for run in runs])
    if ends.size != changes[-1]:
        raise MalformedObject(f"{name}: {ends.size} gaps found, {changes[-1]} announced")
    cuts = [0, *(ends[changes[:-1] - 1] + 1).tolist(), quotients.size]
    ranks = []
    at = 0
    for run, begin, end in zip(runs, cuts[:-1], cuts[1:], strict=True):
        size = low_bytes(run.changes, run.shift)
        gaps = unpack_gaps(
            quotients[begin:end], low[at : at + size], run.shift, run.changes, name=name
        )
        ranks.append(positions_of(gaps, span, name=name))
        at += size
    return np.concatenate(ranks)


def _cut(gaps: IndexArray, runs: Sequence[Run]) -> list[IndexArray]:
    ends = np.cumsum([run.changes for run in runs])
    return np.split(gaps, ends[:-1])
