"""The loops of kernels.py in plain numpy: for machines without numba, and the tests' reference."""

from typing import Any

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray

_CHUNK = 1 << 18
"""Elements handled at a time: temporaries stay in the cache."""
_MASK = (1 << 64) - 1
_U64 = np.uint64


class _Memory:
    """Elements at an address, for ``np.asarray``."""

    def __init__(self, address: int, elements: int, dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (elements,),
            "typestr": dtype.str,
        }


def find_changes(
    pairs: IndexArray,
    source: np.dtype[Any],
    row: int,
    element: int,
    indices: IndexArray,
    values: BitArray,
    old: BitArray,
    count: int,
    ends: IndexArray,
) -> tuple[int, int, int]:
    """See kernels.py."""
    for r in range(row, len(pairs)):
        at, beside, elements, begin = pairs[r].tolist()
        weights = np.asarray(_Memory(at, elements, source))
        shadow = np.asarray(_Memory(beside, elements, values.dtype))
        for first in range(element, elements, _CHUNK):
            fresh, kept = weights[first : first + _CHUNK], shadow[first : first + _CHUNK]
            if count + fresh.size > indices.size:
                return r, first, count
            if fresh.itemsize != kept.itemsize:
                fresh = rounded(fresh)
            hits = _differing(fresh, kept)
            end = count + hits.size
            indices[count:end] = hits + (first + begin)
            old[count:end] = kept[hits]
            values[count:end] = kept[hits] = fresh[hits]
            count = end
        ends[r] = count
        element = 0
    return len(pairs), 0, count


def _differing(fresh: BitArray, kept: BitArray) -> IndexArray:
    """Positions that differ, looking at eight bytes at a time first."""
    per_word = 8 // fresh.itemsize
    whole = fresh.size // per_word * per_word
    words = np.flatnonzero(fresh[:whole].view(_U64) != kept[:whole].view(_U64))
    near = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    near = np.concatenate([near, np.arange(whole, fresh.size)])
    hits: IndexArray = near[fresh[near] != kept[near]]
    return hits


def rounded(master: BitArray) -> BitArray:
    """fp32 bit patterns rounded to bf16 ones: to nearest, ties to even, NaN made quiet."""
    half = np.uint32(0x7FFF) + ((master >> np.uint32(16)) & np.uint32(1))
    bits = ((master + half) >> np.uint32(16)).astype(np.uint16)
    nan = (master & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        bits[nan] = (master[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return bits


def digest_dense(bits: BitArray, offset: int) -> tuple[int, int]:
    """See kernels.py."""
    lane_a = lane_b = 0
    for begin in range(0, bits.size, _CHUNK):
        part = bits[begin : begin + _CHUNK]
        where = np.arange(part.size, dtype=_U64) + _U64(offset + begin)
        a, b = _mixed(where, part.astype(_U64))
        lane_a += int(a.sum(dtype=_U64))
        lane_b += int(b.sum(dtype=_U64))
    return lane_a & _MASK, lane_b & _MASK


def digest_changes(
    indices: IndexArray, old: BitArray, values: BitArray, offset: int
) -> tuple[int, int]:
    """See kernels.py."""
    where = indices.astype(_U64) + _U64(offset)
    old_a, old_b = _mixed(where, old.astype(_U64))
    new_a, new_b = _mixed(where, values.astype(_U64))
    lane_a = int(new_a.sum(dtype=_U64)) - int(old_a.sum(dtype=_U64))
    lane_b = int(new_b.sum(dtype=_U64)) - int(old_b.sum(dtype=_U64))
    return lane_a & _MASK, lane_b & _MASK


def _mixed(where: BitArray, bits: BitArray) -> tuple[BitArray, BitArray]:
    key = where * _U64(0x9E3779B97F4A7C15)
    key ^= key >> _U64(32)
    key ^= bits
    a = key * _U64(0xD6E8FEB86659FD93)
    a ^= a >> _U64(32)
    a *= _U64(0xBF58476D1CE4E5B9)
    a ^= a >> _U64(29)
    b = (key ^ _U64(0xA0761D6478BD642F)) * _U64(0x94D049BB133111EB)
    b ^= b >> _U64(31)
    b *= _U64(0xFF51AFD7ED558CCD)
    b ^= b >> _U64(32)
    return a, b


def gather(bits: BitArray, indices: IndexArray, out: BitArray) -> None:
    """See kernels.py."""
    np.take(bits, indices, out=out)


def scatter(bits: BitArray, indices: IndexArray, values: BitArray) -> None:
    """See kernels.py."""
    bits[indices] = values


def encode_gaps(gaps: IndexArray, shift: int, quotients: BitArray, low: BitArray) -> int:
    """See kernels.py."""
    wide = gaps.astype(np.int64)
    escapes, rest = np.divmod(wide >> shift, 255)
    ends = np.cumsum(escapes + 1)
    size = int(ends[-1]) if ends.size else 0
    quotients[:size] = 255
    quotients[ends - 1] = rest
    if shift:
        bits = (wide[:, None] >> np.arange(shift)) & 1
        packed = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
        low[: packed.size] = packed
    return size


def decode_gaps(quotients: BitArray, low: BitArray, shift: int, gaps: IndexArray) -> bool:
    """See kernels.py."""
    ends = np.flatnonzero(quotients != 255)
    if ends.size != gaps.size or (quotients.size and quotients[-1] == 255):
        return False
    sums = np.cumsum(quotients, dtype=np.int64)[ends]
    wide = np.diff(sums, prepend=0) << shift
    if shift:
        bits = np.unpackbits(low, count=gaps.size * shift, bitorder="little")
        wide += bits.reshape(-1, shift).astype(np.int64) @ (1 << np.arange(shift))
    gaps[:] = wide
    return True


def encode_steps(
    old: BitArray,
    new: BitArray,
    signs: BitArray,
    places: IndexArray,
    sizes: BitArray,
    absolutes: BitArray,
) -> tuple[int, int]:
    """See kernels.py."""
    step = ordered(new) - ordered(old)
    packed = np.packbits(step > 0, bitorder="little")
    signs[: packed.size] = packed
    size = np.abs(step)
    found = np.flatnonzero(size != 1)
    places[: found.size] = found
    sizes[: found.size] = np.minimum(size[found], 255)
    whole = found[size[found] > 254]
    absolutes[: whole.size] = new[whole]
    return found.size, whole.size


def decode_steps(
    old: BitArray,
    signs: BitArray,
    places: IndexArray,
    sizes: BitArray,
    absolutes: BitArray,
    new: BitArray,
) -> None:
    """See kernels.py."""
    size = np.ones(old.size, np.int64)
    size[places] = sizes
    up = np.unpackbits(signs, count=old.size, bitorder="little").astype(bool)
    new[:] = _unordered(ordered(old) + np.where(up, size, -size), old.dtype)
    new[places[sizes == 255]] = absolutes


def ordered(bits: BitArray) -> IndexArray:
    """Bit patterns on the line where neighbours are floats one unit in the last place apart."""
    top = 1 << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int64)
    line: IndexArray = np.where(wide >= top, 2 * top - 1 - wide, wide + top)
    return line


def _unordered(line: IndexArray, dtype: np.dtype[Any]) -> BitArray:
    top = 1 << (8 * dtype.itemsize - 1)
    bits: BitArray = np.where(line >= top, line - top, 2 * top - 1 - line).astype(dtype)
    return bits


def class_gaps(
    bits: BitArray,
    begin: int,
    class_shift: int,
    class_mask: int,
    positions: IndexArray,
    first: int,
    seen: IndexArray,
    last: IndexArray,
    classes: BitArray,
    gaps: IndexArray,
) -> int:
    """See kernels.py."""
    for start in range(0, bits.size, _CHUNK):
        found = _classes(bits[start : start + _CHUNK], class_shift, class_mask)
        end = int(np.searchsorted(positions, begin + start + found.size))
        ranks = _ranks(found, seen)
        here = positions[first:end] - (begin + start)
        mine, at = found[here], ranks[here]
        classes[first:end] = mine
        for c in np.unique(mine):
            of_class = np.flatnonzero(mine == c)
            gaps[first + of_class] = np.diff(at[of_class], prepend=last[c]) - 1
            last[c] = at[of_class[-1]]
        seen += np.bincount(found, minlength=seen.size)
        first = end
    return first


def class_positions(
    bits: BitArray,
    begin: int,
    class_shift: int,
    class_mask: int,
    ranks: IndexArray,
    run_ends: IndexArray,
    cursors: IndexArray,
    seen: IndexArray,
    positions: IndexArray,
    sources: IndexArray,
    first: int,
) -> int:
    """See kernels.py."""
    for start in range(0, bits.size, _CHUNK):
        found = _classes(bits[start : start + _CHUNK], class_shift, class_mask)
        order = np.argsort(found, kind="stable")
        counts = np.bincount(found, minlength=seen.size)
        starts = np.cumsum(counts) - counts
        where, source = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for c in np.flatnonzero(counts):
            run = ranks[cursors[c] : run_ends[c]]
            taken = int(np.searchsorted(run, seen[c] + counts[c]))
            where.append(order[starts[c] + run[:taken] - seen[c]])
            source.append(np.arange(cursors[c], cursors[c] + taken))
            cursors[c] += taken
        seen += counts
        place = np.concatenate(where)
        sort = np.argsort(place)
        end = first + place.size
        positions[first:end] = place[sort] + (begin + start)
        sources[first:end] = np.concatenate(source)[sort]
        first = end
    return first


def _classes(bits: BitArray, class_shift: int, class_mask: int) -> BitArray:
    found: BitArray = ((bits >> bits.dtype.type(class_shift)) & bits.dtype.type(class_mask)).astype(
        np.uint8
    )
    return found


def _ranks(found: BitArray, seen: IndexArray) -> IndexArray:
    """Rank of each element among those of its class, on top of those seen before."""
    order = np.argsort(found, kind="stable")
    counts = np.bincount(found, minlength=seen.size)
    starts = np.cumsum(counts) - counts
    ranks = np.empty(found.size, np.int64)
    ranks[order] = np.arange(found.size) - starts[found[order]] + seen[found[order]]
    return ranks


def split_rotated(bits: BitArray, top: BitArray, rest: BitArray) -> None:
    """See kernels.py."""
    for begin in range(0, bits.size, _CHUNK):
        part = bits[begin : begin + _CHUNK]
        turned = (part << np.uint16(1)) | (part >> np.uint16(15))
        top[begin : begin + _CHUNK] = turned >> np.uint16(8)
        rest[begin : begin + _CHUNK] = turned & np.uint16(0xFF)


def join_rotated(top: BitArray, rest: BitArray, bits: BitArray) -> None:
    """See kernels.py."""
    for begin in range(0, bits.size, _CHUNK):
        upper = top[begin : begin + _CHUNK].astype(np.uint16) << np.uint16(8)
        turned = upper | rest[begin : begin + _CHUNK]
        bits[begin : begin + _CHUNK] = (turned >> np.uint16(1)) | (turned << np.uint16(15))
