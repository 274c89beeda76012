"""The loops of kernels.py in plain numpy: for machines without numba, and the tests' reference."""

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray

_CHUNK = 1 << 18
"""Elements handled at a time: temporaries stay in the cache."""
_MASK = (1 << 64) - 1
_U64 = np.uint64


def find_changes(
    new: BitArray,
    shadow: BitArray,
    first: int,
    indices: IndexArray,
    values: BitArray,
    old: BitArray,
    count: int,
) -> tuple[int, int]:
    """See kernels.py."""
    for begin in range(first, new.size, _CHUNK):
        fresh, kept = new[begin : begin + _CHUNK], shadow[begin : begin + _CHUNK]
        if count + fresh.size > indices.size:
            return begin, count
        hits = _differing(fresh, kept)
        end = count + hits.size
        indices[count:end] = hits + begin
        old[count:end] = kept[hits]
        values[count:end] = fresh[hits]
        kept[hits] = fresh[hits]
        count = end
    return new.size, count


def _differing(fresh: BitArray, kept: BitArray) -> IndexArray:
    """Positions that differ, looking at eight bytes at a time first."""
    per_word = 8 // fresh.itemsize
    whole = fresh.size // per_word * per_word
    words = np.flatnonzero(fresh[:whole].view(_U64) != kept[:whole].view(_U64))
    near = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    near = np.concatenate([near, np.arange(whole, fresh.size)])
    hits: IndexArray = near[fresh[near] != kept[near]]
    return hits


def find_rounded_changes(
    master: BitArray,
    shadow: BitArray,
    first: int,
    indices: IndexArray,
    values: BitArray,
    old: BitArray,
    count: int,
) -> tuple[int, int]:
    """See kernels.py."""
    for begin in range(first, master.size, _CHUNK):
        fresh = rounded(master[begin : begin + _CHUNK])
        if count + fresh.size > indices.size:
            return begin, count
        kept = shadow[begin : begin + _CHUNK]
        _, end = find_changes(fresh, kept, 0, indices, values, old, count)
        indices[count:end] += begin
        count = end
    return master.size, count


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
