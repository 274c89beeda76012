"""The compact encoding: positions at the entropy bound, values as steps from the old ones.

A valid safetensors file of a few streams, cut into segments (see segments.py) that are coded each
on their own: they decode in parallel, in bounded memory, and a tensor of any size fits. Arrays:

* ``segments`` I64 [S, 12]: one ``Row`` for each segment that changed;
* U8 streams, each the segments' parts one after another: ``gap`` (zstd; quotients of position
  gaps) and ``low`` (their raw low bits), see positions.py; then by segment either ``sign``,
  ``place``, ``size``, ``whole`` (steps) or ``plane0``, ``planes`` (absolute), see values.py;
* with encoding ``classes`` also ``run_class`` U8, ``run_shift`` U8, ``run_changes`` I32 [R]: the
  position runs of each segment, see classes.py.

The header lists no names: the layout digest fixes them. On bf16 GRPO steps the whole file is about
1 % above the entropy of independent positions and steps (bench/results/codec.json).
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray, bits_type
from deltawire.codec.classes import Run, check_runs, decode_by_class, encode_by_class
from deltawire.codec.container import Container, Section
from deltawire.codec.parallel import mapped
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.codec.positions import (
    MAX_SHIFT,
    gaps_of,
    low_bytes,
    pack_gaps,
    positions_of,
    shift_of,
    squeeze,
    unpack_gaps,
    unsqueeze,
)
from deltawire.codec.segments import (
    MAX_SEGMENT_ELEMENTS,
    Changes,
    Segment,
    gather_old,
    patches_of,
    segmented,
    units_of,
)
from deltawire.codec.values import (
    MAX_STEP_BYTES,
    Absolute,
    PackedSteps,
    Steps,
    decode_absolute,
    decode_steps,
    encode_absolute,
    encode_steps,
    sign_bytes,
)
from deltawire.protocol.errors import LayoutMismatch

_STEPS, _ABSOLUTE = 0, 1
_STREAMS = ("gap", "low", "sign", "place", "size", "whole", "plane0", "planes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One segment in the table. Lengths of raw streams follow from the counts."""

    begin: int
    """Elements [begin, end) of the run's element order."""
    end: int
    changes: int
    shift: int
    """Raw low bits of a gap; 0 with runs, which have their own."""
    coding: int
    """0: steps; 1: absolute."""
    exceptions: int
    """Steps that are not one unit; 0 when absolute."""
    whole: int
    """Exceptions whose new bits stand whole."""
    gap_bytes: int
    place_bytes: int
    size_bytes: int
    planes_bytes: int
    runs: int
    """Position runs; 0 in the compact encoding, where all positions are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coded:
    """One segment, coded."""

    row: Row
    runs: Sequence[Run]
    streams: dict[str, bytes | BitArray]


def compact_sections(
    patches: Sequence[SparsePatch],
    layout: Layout,
    *,
    base: OldValues | None = None,
    threads: int = 1,
) -> list[Section]:
    """The arrays of a compact file; of a ``classes`` file when `base` is given.

    Segments whose patches carry no old values are coded absolute.
    """

    def code(changes: Changes) -> _Coded:
        return _encode_segment(changes, layout, base)

    coded = mapped(code, segmented(patches, layout), threads=threads)
    sections = [_table("segments", "I64", [astuple(c.row) for c in coded], columns=len(_COLUMNS))]
    for stream in _STREAMS:
        pieces = [c.streams[stream] for c in coded if stream in c.streams]
        size = sum(len(piece) for piece in pieces)
        if size:
            sections.append(Section(name=stream, dtype="U8", shape=(size,), pieces=pieces))
    if base is not None:
        runs = [run for c in coded for run in c.runs]
        sections += [
            _table("run_class", "U8", [run.of_class for run in runs]),
            _table("run_shift", "U8", [run.shift for run in runs]),
            _table("run_changes", "I32", [run.changes for run in runs]),
        ]
    return sections


def read_compact(
    container: Container,
    layout: Layout,
    *,
    old: OldValues | None,
    classes: bool,
    threads: int = 1,
) -> list[SparsePatch]:
    """The patches of a compact or classes file, with old values when `old` is given.

    Raises MalformedObject, or LayoutMismatch when the file is relative and `old` is None.
    """
    rows = _read_rows(container, layout, classes=classes)
    runs = _read_runs(container, rows) if classes else [[] for _ in rows]
    segments = [_segment(row, layout) for row in rows]
    parts = list(_read_parts(container, rows, segments, runs))
    if old is None and (classes or any(row.coding == _STEPS for row in rows)):
        raise LayoutMismatch(f"{container.name}: relative to its base, and no base was given")

    def decode(part: _Part) -> Changes:
        return _decode_segment(part, layout, old, name=container.name)

    return patches_of(mapped(decode, parts, threads=threads), layout)


def _encode_segment(changes: Changes, layout: Layout, base: OldValues | None) -> _Coded:
    segment, count = changes.segment, changes.positions.size
    values, old = changes.values, changes.old
    runs: Sequence[Run] = []
    shift = 0
    if base is None:
        shift = shift_of(count, segment.span)
        quotients, low = pack_gaps(gaps_of(changes.positions), shift)
    else:
        classed = encode_by_class(segment, changes.positions, layout, base)
        runs, quotients, low = classed.runs, classed.quotients, classed.low
        values = values[classed.order]
        old = None if old is None else old[classed.order]
    coded = _encode_values(old, values)
    streams: dict[str, bytes | BitArray] = {"gap": squeeze(quotients), "low": low}
    if isinstance(coded, Steps):
        streams |= {"sign": coded.signs, "place": coded.places}
        streams |= {"size": coded.sizes, "whole": coded.absolutes}
    else:
        streams |= {"plane0": coded.low, "planes": coded.high}
    row = Row(
        begin=segment.begin,
        end=segment.end,
        changes=count,
        shift=shift,
        coding=_STEPS if isinstance(coded, Steps) else _ABSOLUTE,
        exceptions=coded.exceptions if isinstance(coded, Steps) else 0,
        whole=coded.whole if isinstance(coded, Steps) else 0,
        gap_bytes=len(streams["gap"]),
        place_bytes=len(streams.get("place", b"")),
        size_bytes=len(streams.get("size", b"")),
        planes_bytes=len(streams.get("planes", b"")),
        runs=len(runs),
    )
    return _Coded(row=row, runs=runs, streams=streams)


def _encode_values(old: BitArray | None, values: BitArray) -> Steps | Absolute:
    """The smaller of the two codings."""
    if old is None or values.itemsize > MAX_STEP_BYTES:
        return encode_absolute(values)
    steps = encode_steps(old, values)
    if steps.nbytes <= values.size:  # absolute takes a raw byte a change at least
        return steps
    absolute = encode_absolute(values)
    return steps if steps.nbytes <= absolute.nbytes else absolute


def _decode_segment(part: "_Part", layout: Layout, base: OldValues | None, *, name: str) -> Changes:
    row, runs, segment, streams = part.row, part.runs, part.segment, part.streams
    shift = min((run.shift for run in runs), default=row.shift)
    most = row.changes + (segment.span >> shift) // 255
    quotients = unsqueeze(streams["gap"], least=row.changes, most=most, name=name)
    places: IndexArray | None = None
    if runs and base is not None:
        positions, places = decode_by_class(
            segment, runs, quotients, streams["low"], layout, base, name=name
        )
    else:
        gaps = unpack_gaps(quotients, streams["low"], row.shift, row.changes, name=name)
        positions = positions_of(gaps, segment.span, name=name)
    old = None if base is None else gather_old(segment, positions, layout, base)
    values = _decode_values(row, streams, _listed(old, places), segment, name=name)
    return Changes(
        segment=segment,
        positions=positions,
        values=values if places is None else values[places],
        old=old,
    )


def _listed(old: BitArray | None, places: IndexArray | None) -> BitArray | None:
    """Old values in the order of the value streams."""
    if old is None or places is None:
        return old
    listed = np.empty_like(old)
    listed[places] = old
    return listed


def _decode_values(
    row: Row,
    streams: dict[str, BitArray],
    old: BitArray | None,
    segment: Segment,
    *,
    name: str,
) -> BitArray:
    if row.coding == _ABSOLUTE or old is None:
        return decode_absolute(
            streams["plane0"], streams["planes"], bits_type(segment.dtype), name=name
        )
    packed = PackedSteps(
        signs=streams["sign"],
        places=streams["place"],
        sizes=streams["size"],
        absolutes=streams["whole"],
        exceptions=row.exceptions,
        whole=row.whole,
    )
    return decode_steps(packed, old, name=name)


_COLUMNS = fields(Row)


def _read_rows(container: Container, layout: Layout, *, classes: bool) -> list[Row]:
    entry = container.entries.get("segments")
    if entry is None or entry.dtype != "I64" or entry.shape[1:] != (len(_COLUMNS),):
        raise container.wrong(f"expected an array segments I64 [S, {len(_COLUMNS)}]")
    borders = {unit.begin: unit for unit in units_of(layout)}
    if entry.shape[0] > len(borders):
        raise container.wrong(f"{entry.shape[0]} segments where {len(borders)} can be")
    ends = {unit.end for unit in borders.values()}
    table = container.read("segments").view(np.int64).reshape(-1, len(_COLUMNS))
    rows = [
        Row(**dict(zip((c.name for c in _COLUMNS), line, strict=True))) for line in table.tolist()
    ]
    at = 0
    for row in rows:
        if row.begin < at or row.begin not in borders or row.end not in ends:
            raise container.wrong(f"no segment can be [{row.begin}, {row.end})")
        at = row.end
        _check_row(row, container, layout, classes=classes)
    return rows


def _check_row(row: Row, container: Container, layout: Layout, *, classes: bool) -> None:
    span = row.end - row.begin
    one_dtype = len({tensor.dtype for tensor, _, _ in layout.between(row.begin, row.end)}) == 1
    segment = _segment(row, layout)
    stepped = bits_type(segment.dtype).itemsize <= MAX_STEP_BYTES
    right = (
        0 < span < MAX_SEGMENT_ELEMENTS
        and one_dtype
        and 0 < row.changes <= span
        and 0 <= row.shift <= MAX_SHIFT
        and (row.coding == _ABSOLUTE or (row.coding == _STEPS and stepped))
        and min(astuple(row)) >= 0
        and (row.runs > 0) == classes
    )
    if not right:
        raise container.wrong(f"segment [{row.begin}, {row.end}): impossible row {astuple(row)}")


def _read_runs(container: Container, rows: list[Row]) -> list[list[Run]]:
    total = sum(row.runs for row in rows)
    columns: list[list[int]] = []
    for name, dtype in (("run_class", "U8"), ("run_shift", "U8"), ("run_changes", "I32")):
        entry = container.entries.get(name)
        if entry is None or entry.dtype != dtype or entry.shape != (total,):
            raise container.wrong(f"expected an array {name} {dtype} [{total}]")
        bits = container.read(name)
        columns.append((bits.view(np.int32) if dtype == "I32" else bits).tolist())
    runs = [Run(of_class=c, shift=s, changes=n) for c, s, n in zip(*columns, strict=True)]
    found: list[list[Run]] = []
    at = 0
    for row in rows:
        found.append(runs[at : at + row.runs])
        at += row.runs
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One segment as it was read."""

    row: Row
    segment: Segment
    runs: list[Run]
    streams: dict[str, BitArray]


def _read_parts(
    container: Container, rows: list[Row], segments: list[Segment], runs: list[list[Run]]
) -> Iterator[_Part]:
    """Each segment with its slices of the streams. Every byte of a stream belongs to a segment."""
    ends = dict.fromkeys(_STREAMS, 0)
    for row, segment, own in zip(rows, segments, runs, strict=True):
        sizes = _stream_bytes(row, segment, own, container)
        streams: dict[str, BitArray] = {}
        for stream, size in sizes.items():
            begin = ends[stream]
            ends[stream] = begin + size
            streams[stream] = (
                container.read_range(stream, begin, begin + size) if size else np.empty(0, np.uint8)
            )
        yield _Part(row=row, segment=segment, runs=own, streams=streams)
    for stream, end in ends.items():
        entry = container.entries.get(stream)
        if entry is not None and (entry.dtype != "U8" or entry.end - entry.begin != end):
            raise container.wrong(f"stream {stream}: {end} bytes belong to segments")
    known = {"segments", "run_class", "run_shift", "run_changes", *_STREAMS}
    if not container.entries.keys() <= known:
        raise container.wrong(f"unknown arrays {sorted(container.entries.keys() - known)[:4]}")


def _stream_bytes(
    row: Row, segment: Segment, runs: list[Run], container: Container
) -> dict[str, int]:
    """Bytes of each stream in one segment."""
    low = low_bytes(row.changes, row.shift)
    if runs:
        check_runs(runs, segment, row.changes, name=container.name)
        low = sum(low_bytes(run.changes, run.shift) for run in runs)
    steps = row.coding == _STEPS
    return {
        "gap": row.gap_bytes,
        "low": low,
        "sign": sign_bytes(row.changes) if steps else 0,
        "place": row.place_bytes,
        "size": row.size_bytes,
        "whole": row.whole * bits_type(segment.dtype).itemsize,
        "plane0": 0 if steps else row.changes,
        "planes": row.planes_bytes,
    }


def _segment(row: Row, layout: Layout) -> Segment:
    tensor, _, _ = next(layout.between(row.begin, row.begin + 1))
    return Segment(begin=row.begin, end=row.end, dtype=tensor.dtype)


def _table(name: str, dtype: str, rows: Sequence[object], *, columns: int | None = None) -> Section:
    array = np.array(rows, dtype={"I64": "<i8", "I32": "<i4", "U8": "<u1"}[dtype])
    shape = (len(rows),) if columns is None else (len(rows), columns)
    return Section(name=name, dtype=dtype, shape=shape, pieces=[array.reshape(shape)])
