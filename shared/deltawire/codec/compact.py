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

from collections.abc import Sequence

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray, bits_type
from deltawire.codec.classes import Run, decode_by_class, encode_by_class
from deltawire.codec.container import Container, Section
from deltawire.codec.parallel import mapped
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.codec.positions import (
    gaps_of,
    pack_gaps,
    positions_of,
    shift_of,
    squeeze,
    unpack_gaps,
    unsqueeze,
)
from deltawire.codec.segment_file import (
    ABSOLUTE,
    STEPS,
    Part,
    ReadPart,
    Row,
    read_parts,
    sections_of,
)
from deltawire.codec.segments import Changes, gather_old, patches_of, segmented
from deltawire.codec.values import (
    MAX_STEP_BYTES,
    Absolute,
    PackedSteps,
    Steps,
    decode_absolute,
    decode_steps,
    encode_absolute,
    encode_steps,
)
from deltawire.protocol.errors import LayoutMismatch


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

    def encode(changes: Changes) -> Part:
        return _encode_segment(changes, layout, base)

    parts = mapped(encode, segmented(patches, layout), threads=threads)
    return sections_of(parts, classes=base is not None)


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
    parts = read_parts(container, layout, classes=classes)
    if old is None and (classes or any(part.row.coding == STEPS for part in parts)):
        raise LayoutMismatch(f"{container.name}: relative to its base, and no base was given")

    def decode(part: ReadPart) -> Changes:
        return _decode_segment(part, layout, old, name=container.name)

    return patches_of(mapped(decode, parts, threads=threads), layout)


def _encode_segment(changes: Changes, layout: Layout, base: OldValues | None) -> Part:
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
        coding=STEPS if isinstance(coded, Steps) else ABSOLUTE,
        exceptions=coded.exceptions if isinstance(coded, Steps) else 0,
        whole=coded.whole if isinstance(coded, Steps) else 0,
        gap_bytes=len(streams["gap"]),
        place_bytes=len(streams.get("place", b"")),
        size_bytes=len(streams.get("size", b"")),
        planes_bytes=len(streams.get("planes", b"")),
        runs=len(runs),
    )
    return Part(row=row, runs=runs, streams=streams)


def _encode_values(old: BitArray | None, values: BitArray) -> Steps | Absolute:
    """The smaller of the two codings."""
    if old is None or values.itemsize > MAX_STEP_BYTES:
        return encode_absolute(values)
    steps = encode_steps(old, values)
    if steps.nbytes <= values.size:  # absolute takes a raw byte a change at least
        return steps
    absolute = encode_absolute(values)
    return steps if steps.nbytes <= absolute.nbytes else absolute


def _decode_segment(
    part: ReadPart, layout: Layout, base: OldValues | None, *, name: str
) -> Changes:
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
    values = _decode_values(part, _listed(old, places), name=name)
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


def _decode_values(part: ReadPart, old: BitArray | None, *, name: str) -> BitArray:
    row, streams = part.row, part.streams
    if row.coding == ABSOLUTE or old is None:
        dtype = bits_type(part.segment.dtype)
        return decode_absolute(streams["plane0"], streams["planes"], dtype, name=name)
    packed = PackedSteps(
        signs=streams["sign"],
        places=streams["place"],
        sizes=streams["size"],
        absolutes=streams["whole"],
        exceptions=row.exceptions,
        whole=row.whole,
    )
    return decode_steps(packed, old, name=name)
