"""How coded segments lie in a file: a table of rows, and streams they have parts of.

The reader checks rows against the layout and every length against the file before it reads a
stream. What the streams hold is compact.py's to check.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from deltawire.codec.bits import BitArray, bits_type
from deltawire.codec.classes import Run, check_runs
from deltawire.codec.container import Container, Section
from deltawire.codec.patch import Layout
from deltawire.codec.positions import MAX_SHIFT, low_bytes
from deltawire.codec.segments import MAX_SEGMENT_ELEMENTS, Segment, units_of
from deltawire.codec.values import MAX_STEP_BYTES, sign_bytes

STEPS, ABSOLUTE = 0, 1
_STREAMS = ("gap", "low", "sign", "place", "size", "whole", "plane0", "planes")
_RUN_COLUMNS = (("run_class", "U8"), ("run_shift", "U8"), ("run_changes", "I32"))


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


_COLUMNS = fields(Row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One coded segment: its row, its runs (none in compact) and its part of every stream."""

    row: Row
    runs: Sequence[Run]
    streams: Mapping[str, bytes | BitArray]


def sections_of(parts: Sequence[Part], *, classes: bool) -> list[Section]:
    """The arrays of a file that holds these segments."""
    table = np.array([astuple(part.row) for part in parts], "<i8").reshape(-1, len(_COLUMNS))
    sections = [Section(name="segments", dtype="I64", shape=table.shape, pieces=[table])]
    for stream in _STREAMS:
        pieces = [part.streams[stream] for part in parts if stream in part.streams]
        size = sum(len(piece) for piece in pieces)
        if size:
            sections.append(Section(name=stream, dtype="U8", shape=(size,), pieces=pieces))
    if classes:
        runs = [run for part in parts for run in part.runs]
        columns = (
            np.array([run.of_class for run in runs], "<u1"),
            np.array([run.shift for run in runs], "<u1"),
            np.array([run.changes for run in runs], "<i4"),
        )
        sections += [
            Section(name=name, dtype=dtype, shape=(len(runs),), pieces=[column])
            for (name, dtype), column in zip(_RUN_COLUMNS, columns, strict=True)
        ]
    return sections


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """One segment as it was read: every stream is there, empty where it has none."""

    row: Row
    segment: Segment
    runs: Sequence[Run]
    streams: Mapping[str, BitArray]


def read_parts(container: Container, layout: Layout, *, classes: bool) -> list[ReadPart]:
    """Every segment of a file. Raises MalformedObject."""
    rows = _read_rows(container, layout, classes=classes)
    runs = _read_runs(container, rows) if classes else [[] for _ in rows]
    return list(_parts(container, layout, rows, runs, classes=classes))


def _parts(
    container: Container,
    layout: Layout,
    rows: list[Row],
    runs: list[list[Run]],
    *,
    classes: bool,
) -> Iterator[ReadPart]:
    """Every byte of a stream belongs to a segment, and no array is left over."""
    ends = dict.fromkeys(_STREAMS, 0)
    for row, own in zip(rows, runs, strict=True):
        segment = _segment(row, layout)
        streams: dict[str, BitArray] = {}
        for stream, size in _stream_bytes(row, segment, own, container).items():
            begin = ends[stream]
            ends[stream] = begin + size
            streams[stream] = (
                container.read_range(stream, begin, begin + size) if size else np.empty(0, np.uint8)
            )
        yield ReadPart(row=row, segment=segment, runs=own, streams=streams)
    for stream, end in ends.items():
        entry = container.entries.get(stream)
        if entry is not None and (entry.dtype != "U8" or entry.end - entry.begin != end):
            raise container.wrong(f"stream {stream}: {end} bytes belong to segments")
    known = {"segments", *_STREAMS, *(name for name, _ in _RUN_COLUMNS if classes)}
    if not container.entries.keys() <= known:
        raise container.wrong(f"unknown arrays {sorted(container.entries.keys() - known)[:4]}")


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
        and (row.coding == ABSOLUTE or (row.coding == STEPS and stepped))
        and min(astuple(row)) >= 0
        and (row.runs > 0) == classes
    )
    if not right:
        raise container.wrong(f"segment [{row.begin}, {row.end}): impossible row {astuple(row)}")


def _read_runs(container: Container, rows: list[Row]) -> list[list[Run]]:
    total = sum(row.runs for row in rows)
    columns: list[list[int]] = []
    for name, dtype in _RUN_COLUMNS:
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


def _stream_bytes(
    row: Row, segment: Segment, runs: list[Run], container: Container
) -> dict[str, int]:
    """Bytes of each stream in one segment."""
    low = low_bytes(row.changes, row.shift)
    if runs:
        check_runs(runs, segment, row.changes, name=container.name)
        low = sum(low_bytes(run.changes, run.shift) for run in runs)
    steps = row.coding == STEPS
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
