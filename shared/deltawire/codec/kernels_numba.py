"""The loops of kernels.py compiled by numba, without the GIL. Import only through kernels.load().

Unsigned constants are spelled as numpy scalars throughout: numba turns uint64 with a plain int
into a float.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from deltawire.codec.bits import BitArray, IndexArray

_U64 = np.uint64


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at first call; keep the result on disk where numba finds a writable place."""
    try:
        compiled: Callable[..., Any] = njit(nogil=True, cache=True)(loop)
    except RuntimeError:  # a read-only installation with no home: compile in each process
        compiled = njit(nogil=True)(loop)
    return compiled


@njit(inline="always")
def _emit(new, shadow, j, indices, values, old, count):  # type: ignore[no-untyped-def]
    if new[j] != shadow[j]:
        indices[count] = j
        values[count] = new[j]
        old[count] = shadow[j]
        shadow[j] = new[j]
        count += 1
    return count


@_compiled
def _find_changes(new, shadow, new_words, words, first, indices, values, old, count):  # type: ignore[no-untyped-def]
    per_word = 8 // new.itemsize
    group = 8 * per_word
    room = indices.size - group
    for g in range(first // group, words.size // 8):
        w = 8 * g
        differ = (new_words[w] ^ words[w]) | (new_words[w + 1] ^ words[w + 1])
        differ |= (new_words[w + 2] ^ words[w + 2]) | (new_words[w + 3] ^ words[w + 3])
        differ |= (new_words[w + 4] ^ words[w + 4]) | (new_words[w + 5] ^ words[w + 5])
        differ |= (new_words[w + 6] ^ words[w + 6]) | (new_words[w + 7] ^ words[w + 7])
        if differ:
            if count > room:
                return w * per_word, count
            for v in range(w, w + 8):
                if new_words[v] != words[v]:
                    for j in range(v * per_word, (v + 1) * per_word):
                        count = _emit(new, shadow, j, indices, values, old, count)
    tail = words.size // 8 * group
    if count > room:
        return max(first, tail), count
    for j in range(max(first, tail), new.size):
        count = _emit(new, shadow, j, indices, values, old, count)
    return new.size, count


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
    words = shadow.size * shadow.itemsize // 8 * 8 // shadow.itemsize
    at, found = _find_changes(
        new,
        shadow,
        new[:words].view(_U64),
        shadow[:words].view(_U64),
        first,
        indices,
        values,
        old,
        count,
    )
    return int(at), int(found)


@_compiled
def _find_rounded_changes(master, shadow, words, first, indices, values, old, count):  # type: ignore[no-untyped-def]
    block = 4096
    fresh = np.empty(block, np.uint16)
    fresh_words = fresh.view(np.uint64)
    for begin in range(first, master.size, block):
        size = min(block, master.size - begin)
        if count + size > indices.size:
            return begin, count
        part = master[begin : begin + size]
        for j in range(size):
            u = part[j]
            up = np.uint32(0x7FFF) + (np.uint32(u >> np.uint32(16)) & np.uint32(1))
            fresh[j] = np.uint16(np.uint32(u + up) >> np.uint32(16))
        whole = size // 4
        kept = shadow[begin : begin + size]
        for w in range(whole):
            if fresh_words[w] != words[begin // 4 + w]:
                for j in range(4 * w, 4 * w + 4):
                    before = count
                    count = _emit_rounded(part, fresh, kept, j, indices, values, old, count)
                    if count != before:
                        indices[before] += begin
        for j in range(4 * whole, size):
            before = count
            count = _emit_rounded(part, fresh, kept, j, indices, values, old, count)
            if count != before:
                indices[before] += begin
    return master.size, count


@njit(inline="always")
def _emit_rounded(master, fresh, kept, j, indices, values, old, count):  # type: ignore[no-untyped-def]
    u = master[j]
    if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        fresh[j] = np.uint16(np.uint16(u >> np.uint32(16)) | np.uint16(0x40))
    return _emit(fresh, kept, j, indices, values, old, count)


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
    words = shadow[: shadow.size // 4 * 4].view(_U64)
    at, found = _find_rounded_changes(master, shadow, words, first, indices, values, old, count)
    return int(at), int(found)


@njit(inline="always")
def _key(where, bits):  # type: ignore[no-untyped-def]
    key = _U64(where) * _U64(0x9E3779B97F4A7C15)
    key ^= key >> _U64(32)
    return key ^ _U64(bits)


@njit(inline="always")
def _lane_a(key):  # type: ignore[no-untyped-def]
    a = key * _U64(0xD6E8FEB86659FD93)
    a ^= a >> _U64(32)
    a *= _U64(0xBF58476D1CE4E5B9)
    return a ^ (a >> _U64(29))


@njit(inline="always")
def _lane_b(key):  # type: ignore[no-untyped-def]
    b = (key ^ _U64(0xA0761D6478BD642F)) * _U64(0x94D049BB133111EB)
    b ^= b >> _U64(31)
    b *= _U64(0xFF51AFD7ED558CCD)
    return b ^ (b >> _U64(32))


@_compiled
def _digest_dense(bits, offset):  # type: ignore[no-untyped-def]
    a = _U64(0)
    b = _U64(0)
    for i in range(bits.size):
        key = _key(_U64(i) + offset, bits[i])
        a += _lane_a(key)
        b += _lane_b(key)
    return a, b


def digest_dense(bits: BitArray, offset: int) -> tuple[int, int]:
    """See kernels.py."""
    a, b = _digest_dense(bits, _U64(offset))
    return int(a), int(b)


@_compiled
def _digest_changes(indices, old, values, offset):  # type: ignore[no-untyped-def]
    a = _U64(0)
    b = _U64(0)
    for k in range(indices.size):
        where = _U64(indices[k]) + offset
        before = _key(where, old[k])
        after = _key(where, values[k])
        a += _lane_a(after) - _lane_a(before)
        b += _lane_b(after) - _lane_b(before)
    return a, b


def digest_changes(
    indices: IndexArray, old: BitArray, values: BitArray, offset: int
) -> tuple[int, int]:
    """See kernels.py."""
    a, b = _digest_changes(indices, old, values, _U64(offset))
    return int(a), int(b)


@_compiled
def gather(bits, indices, out):  # type: ignore[no-untyped-def]
    """See kernels.py."""
    for k in range(indices.size):
        out[k] = bits[indices[k]]


@_compiled
def scatter(bits, indices, values):  # type: ignore[no-untyped-def]
    """See kernels.py."""
    for k in range(indices.size):
        bits[indices[k]] = values[k]


@_compiled
def _encode_gaps(gaps, shift, quotients, low):  # type: ignore[no-untyped-def]
    held = _U64(0)
    bits = 0
    at = 0
    size = 0
    mask = (_U64(1) << _U64(shift)) - _U64(1)
    for k in range(gaps.size):
        gap = np.int64(gaps[k])
        if shift:
            held |= (_U64(gap) & mask) << _U64(bits)
            bits += shift
            while bits >= 8:
                low[at] = held & _U64(255)
                held >>= _U64(8)
                at += 1
                bits -= 8
        quotient = gap >> shift
        while quotient >= 255:
            quotients[size] = 255
            size += 1
            quotient -= 255
        quotients[size] = quotient
        size += 1
    if bits:
        low[at] = held & _U64(255)
    return size


def encode_gaps(gaps: IndexArray, shift: int, quotients: BitArray, low: BitArray) -> int:
    """See kernels.py."""
    return int(_encode_gaps(gaps, shift, quotients, low))


@_compiled
def _decode_gaps(quotients, low, shift, gaps):  # type: ignore[no-untyped-def]
    held = _U64(0)
    bits = 0
    at = 0
    k = 0
    quotient = np.int64(0)
    mask = (_U64(1) << _U64(shift)) - _U64(1)
    for i in range(quotients.size):
        byte = np.int64(quotients[i])
        quotient += byte
        if byte == 255:
            continue
        if k == gaps.size:
            return False
        gap = quotient << shift
        if shift:
            while bits < shift:
                held |= _U64(low[at]) << _U64(bits)
                at += 1
                bits += 8
            gap |= np.int64(held & mask)
            held >>= _U64(shift)
            bits -= shift
        gaps[k] = gap
        k += 1
        quotient = np.int64(0)
    return k == gaps.size and quotient == 0 and (quotients.size == 0 or quotients[-1] != 255)


def decode_gaps(quotients: BitArray, low: BitArray, shift: int, gaps: IndexArray) -> bool:
    """See kernels.py."""
    return bool(_decode_gaps(quotients, low, shift, gaps))


@njit(inline="always")
def _ordered(bits, top):  # type: ignore[no-untyped-def]
    wide = np.int64(bits)
    return 2 * top - 1 - wide if wide >= top else wide + top


@njit(inline="always")
def _unordered(line, top):  # type: ignore[no-untyped-def]
    return line - top if line >= top else 2 * top - 1 - line


@_compiled
def _encode_steps(old, new, signs, places, sizes, absolutes):  # type: ignore[no-untyped-def]
    top = np.int64(1) << (8 * old.itemsize - 1)
    exceptions = 0
    whole = 0
    signs[:] = 0
    for k in range(old.size):
        step = _ordered(new[k], top) - _ordered(old[k], top)
        if step > 0:
            signs[k >> 3] |= np.uint8(1 << (k & 7))
        if step == 1 or step == -1:
            continue
        size = abs(step)
        places[exceptions] = k
        if size < 255:
            sizes[exceptions] = size
        else:
            sizes[exceptions] = 255
            absolutes[whole] = new[k]
            whole += 1
        exceptions += 1
    return exceptions, whole


def encode_steps(
    old: BitArray,
    new: BitArray,
    signs: BitArray,
    places: IndexArray,
    sizes: BitArray,
    absolutes: BitArray,
) -> tuple[int, int]:
    """See kernels.py."""
    exceptions, whole = _encode_steps(old, new, signs, places, sizes, absolutes)
    return int(exceptions), int(whole)


@_compiled
def decode_steps(old, signs, places, sizes, absolutes, new):  # type: ignore[no-untyped-def]
    """See kernels.py."""
    top = np.int64(1) << (8 * old.itemsize - 1)
    for k in range(old.size):
        step = 2 * np.int64((signs[k >> 3] >> np.uint8(k & 7)) & 1) - 1
        new[k] = _unordered(_ordered(old[k], top) + step, top)
    whole = 0
    for e in range(places.size):
        k = places[e]
        size = np.int64(sizes[e])
        if size == 255:
            new[k] = absolutes[whole]
            whole += 1
        else:
            up = (signs[k >> 3] >> np.uint8(k & 7)) & 1
            new[k] = _unordered(_ordered(old[k], top) + (size if up else -size), top)


@_compiled
def _class_gaps(bits, begin, shift, mask, positions, first, seen, last, classes, gaps):  # type: ignore[no-untyped-def]
    k = first
    upcoming = positions[k] - begin if k < positions.size else -1
    for i in range(bits.size):
        c = np.int64(bits[i] >> shift) & mask
        if i == upcoming:
            classes[k] = c
            gaps[k] = seen[c] - last[c] - 1
            last[c] = seen[c]
            k += 1
            upcoming = positions[k] - begin if k < positions.size else -1
        seen[c] += 1
    return k


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
    shift = bits.dtype.type(class_shift)
    return int(
        _class_gaps(bits, begin, shift, class_mask, positions, first, seen, last, classes, gaps)
    )


@_compiled
def _class_positions(  # type: ignore[no-untyped-def]
    bits, begin, shift, mask, ranks, run_ends, cursors, seen, positions, sources, first
):
    never = np.int64(1) << 62
    upcoming = np.empty(seen.size, np.int64)
    for c in range(seen.size):
        upcoming[c] = ranks[cursors[c]] if cursors[c] < run_ends[c] else never
    k = first
    for i in range(bits.size):
        c = np.int64(bits[i] >> shift) & mask
        if seen[c] == upcoming[c]:
            positions[k] = begin + i
            sources[k] = cursors[c]
            k += 1
            cursors[c] += 1
            upcoming[c] = ranks[cursors[c]] if cursors[c] < run_ends[c] else never
        seen[c] += 1
    return k


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
    shift = bits.dtype.type(class_shift)
    return int(
        _class_positions(
            bits,
            begin,
            shift,
            class_mask,
            ranks,
            run_ends,
            cursors,
            seen,
            positions,
            sources,
            first,
        )
    )


@_compiled
def split_rotated(bits, top, rest):  # type: ignore[no-untyped-def]
    """See kernels.py."""
    for i in range(bits.size):
        turned = np.uint16(bits[i] << np.uint16(1)) | np.uint16(bits[i] >> np.uint16(15))
        top[i] = turned >> np.uint16(8)
        rest[i] = turned & np.uint16(0xFF)


@_compiled
def join_rotated(top, rest, bits):  # type: ignore[no-untyped-def]
    """See kernels.py."""
    for i in range(bits.size):
        turned = np.uint16(np.uint16(top[i]) << np.uint16(8)) | np.uint16(rest[i])
        bits[i] = np.uint16(turned >> np.uint16(1)) | np.uint16(turned << np.uint16(15))
