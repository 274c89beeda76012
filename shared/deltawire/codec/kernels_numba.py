"""The loops of kernels.py compiled by numba, without the GIL. Import only through kernels.load().

Unsigned constants are spelled as numpy scalars throughout: numba turns uint64 with a plain int
into a float.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from deltawire.codec.bits import BitArray, IndexArray

_U64 = np.uint64
_GROUP_BYTES = 64
"""Of the shadow, compared at once: a cache line."""
_AHEAD_BYTES = 8192
"""How far ahead memory is asked for: what the loop does with a change must not stop the stream."""

_AHEAD_CHANGES = 32
"""How many changes ahead their lines are asked for: no processor foresees where they lie."""


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at first call; keep the result on disk where numba finds a writable place."""
    try:
        compiled: Callable[..., Any] = njit(nogil=True, cache=True)(loop)
    except RuntimeError:  # a read-only installation with no home: compile in each process
        compiled = njit(nogil=True)(loop)
    return compiled


@intrinsic
def _pointer(typing_context, address, like):  # type: ignore[no-untyped-def]
    """The address, pointing to elements of the type of the array `like`."""
    pointer = types.CPointer(like.dtype)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(address, like), generate


def _place(context, builder, signature, args, array, lanes):  # type: ignore[no-untyped-def]
    """Where `lanes` elements of the array argument begin, at the index argument after it."""
    struct = context.make_array(signature.args[array])(context, builder, args[array])
    vector = ir.VectorType(ir.IntType(signature.args[array].dtype.bitwidth), lanes)
    return builder.bitcast(builder.gep(struct.data, [args[array + 1]]), vector.as_pointer())


def _load(context, builder, signature, args, array, lanes):  # type: ignore[no-untyped-def]
    """Those elements."""
    place = _place(context, builder, signature, args, array, lanes)
    return builder.load(place, align=signature.args[array].dtype.bitwidth // 8)


def _rounded(builder, bits):  # type: ignore[no-untyped-def]
    """fp32 to bf16 in all lanes: to nearest, ties to even; a NaN becomes quiet and keeps its upper
    payload."""
    wide = bits.type

    def all_lanes(value):  # type: ignore[no-untyped-def]
        return ir.Constant(wide, [value] * wide.count)

    top = builder.lshr(bits, all_lanes(16))
    half = builder.add(builder.and_(top, all_lanes(1)), all_lanes(0x7FFF))
    near = builder.lshr(builder.add(bits, half), all_lanes(16))
    nan = builder.icmp_unsigned(">", builder.shl(bits, all_lanes(1)), all_lanes(0xFF000000))
    quiet = builder.or_(top, all_lanes(0x40))
    return builder.trunc(
        builder.select(nan, quiet, near), ir.VectorType(ir.IntType(16), wide.count)
    )


@intrinsic
def _differing(typing_context, new, i, shadow, j):  # type: ignore[no-untyped-def]
    """Bit k is set when new[i + k], as published, != shadow[j + k], for 64 bytes of the shadow.

    One comparison of vectors, which LLVM lowers to what the processor has.
    """
    lanes = _GROUP_BYTES * 8 // shadow.dtype.bitwidth

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        here = (context, builder, signature, args)
        fresh, kept = _load(*here, 0, lanes), _load(*here, 2, lanes)
        if fresh.type != kept.type:
            fresh = _rounded(builder, fresh)
        differ = builder.icmp_unsigned("!=", fresh, kept)
        mask = builder.bitcast(differ, ir.IntType(lanes))
        return builder.zext(mask, ir.IntType(64)) if lanes < 64 else mask

    return types.uint64(new, i, shadow, j), generate


@intrinsic
def _prefetch(typing_context, array, i):  # type: ignore[no-untyped-def]
    """Ask for the cache line of an element, which need not exist."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = _place(context, builder, signature, args, 0, 1)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        hints = [ir.Constant(word, hint) for hint in (0, 3, 1)]  # to read, near, data
        builder.call(function, [builder.bitcast(place, byte), *hints])
        return context.get_dummy_value()

    return types.none(array, i), generate


@intrinsic
def _lowest_bit(typing_context, mask):  # type: ignore[no-untyped-def]
    """Number of the lowest bit that is set."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@njit(inline="always")
def _emit(value, shadow, j, begin, indices, values, old, count):  # type: ignore[no-untyped-def]
    indices[count] = begin + j
    values[count] = value
    old[count] = shadow[j]
    shadow[j] = value


@intrinsic
def _published(typing_context, value, shadow):  # type: ignore[no-untyped-def]
    """The value as the shadow keeps it."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if value.bitwidth == shadow.dtype.bitwidth:
            return args[0]
        lane = ir.VectorType(ir.IntType(value.bitwidth), 1)
        rounded = _rounded(builder, builder.bitcast(args[0], lane))
        return builder.bitcast(rounded, ir.IntType(shadow.dtype.bitwidth))

    return shadow.dtype(value, shadow), generate


@njit(nogil=True)
def _find_in_one(new, shadow, first, begin, indices, values, old, count):  # type: ignore[no-untyped-def]
    group = _GROUP_BYTES // shadow.itemsize
    ahead = _AHEAD_BYTES // shadow.itemsize
    lines = new.itemsize // shadow.itemsize
    whole = new.size // group * group
    for i in range(first, whole, group):
        _prefetch(shadow, i + ahead)
        for line in range(lines):
            _prefetch(new, i + ahead + line * (group // lines))
        differ = _differing(new, i, shadow, i)
        if differ and count + group > indices.size:
            return i, count
        while differ:
            j = i + np.int64(_lowest_bit(differ))
            differ &= differ - _U64(1)
            _emit(_published(new[j], shadow), shadow, j, begin, indices, values, old, count)
            count += 1
    if count + group > indices.size:
        return max(first, whole), count
    for k in range(max(first, whole), new.size):
        fresh = _published(new[k], shadow)
        if fresh != shadow[k]:
            _emit(fresh, shadow, k, begin, indices, values, old, count)
            count += 1
    return new.size, count


@_compiled
def _find_changes(pairs, like, row, element, indices, values, old, count, ends):  # type: ignore[no-untyped-def]
    for r in range(row, pairs.shape[0]):
        size = pairs[r, 2]
        new = carray(_pointer(pairs[r, 0], like), size)
        shadow = carray(_pointer(pairs[r, 1], values), size)
        element, count = _find_in_one(
            new, shadow, element, pairs[r, 3], indices, values, old, count
        )
        if element < size:
            return r, element, count
        ends[r] = count
        element = 0
    return pairs.shape[0], 0, count


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
    like = np.empty(0, source)
    row, element, count = _find_changes(
        pairs, like, row, element, indices, values, old, count, ends
    )
    return int(row), int(element), int(count)


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
    last = indices.size - 1
    for k in range(indices.size):
        _prefetch(bits, np.int64(indices[min(k + _AHEAD_CHANGES, last)]))
        out[k] = bits[indices[k]]


@_compiled
def scatter(bits, indices, values):  # type: ignore[no-untyped-def]
    """See kernels.py."""
    last = indices.size - 1
    for k in range(indices.size):
        _prefetch(bits, np.int64(indices[min(k + _AHEAD_CHANGES, last)]))
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
