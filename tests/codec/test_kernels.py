"""The compiled loops against the numpy ones: same inputs, equal outputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray, IndexArray
from deltawire.codec.kernels import Kernels

from .models import seeds

pytest.importorskip("numba")
COMPILED, PLAIN = kernels.load(compiled=True), kernels.load(compiled=False)
WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def test_without_numba_the_numpy_loops_are_loaded() -> None:
    assert COMPILED.__name__.endswith("kernels_numba")  # type: ignore[attr-defined]
    assert PLAIN.__name__.endswith("kernels_numpy")  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", WIDTHS)
@given(seed=seeds, size=st.integers(0, 700), shift=st.integers(0, 3), room=st.integers(64, 2000))
@settings(max_examples=60, deadline=None)
def test_both_find_the_same_changes_wherever_the_room_ends(
    width: type, seed: int, size: int, shift: int, room: int
) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, size + shift).astype(width)
    after = before.copy()
    after[rng.random(before.size) < rng.choice([0.01, 0.3, 1.0])] ^= width(1)

    mine = run(COMPILED, after[shift:], before[shift:].copy(), room)
    plain = run(PLAIN, after[shift:], before[shift:].copy(), room)

    truth = np.flatnonzero(after[shift:] != before[shift:])
    for indices, values, old, shadow in (mine, plain):
        assert np.array_equal(indices, truth)
        assert np.array_equal(values, after[shift:][truth])
        assert np.array_equal(old, before[shift:][truth])
        assert np.array_equal(shadow, after[shift:])


SPECIAL = [
    *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF),
    *(0x7F7FFFFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x00008000, 0x00018000, 1),
]
"""Signed zeros, infinities, NaNs that would round to infinity or to -0.0, overflow, and ties."""


@given(seed=seeds, size=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_both_round_masters_alike(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    master = rng.integers(0, 2**32, size, dtype=np.uint32)
    master[rng.random(size) < 0.3] = rng.choice(np.array(SPECIAL, np.uint32))
    shadow = (master >> np.uint32(16)).astype(np.uint16)  # near misses: cut, not rounded
    shadow[rng.random(size) < 0.2] = rng.choice(np.array([0x7F80, 0x8000, 0], np.uint16))

    mine = run(COMPILED, master, shadow.copy(), 4096)
    plain = run(PLAIN, master, shadow.copy(), 4096)

    for found, expected in zip(mine, plain, strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_both_digest_gather_and_scatter_alike(width: type) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, np.iinfo(width).max, 1000, dtype=width)
    indices = np.sort(rng.choice(1000, 100, replace=False)).astype(np.int32)
    values = rng.integers(0, np.iinfo(width).max, 100, dtype=width)
    offset = 2**33 + 5
    results = []
    for loops in (COMPILED, PLAIN):
        live, old = bits.copy(), np.empty(100, width)
        loops.gather(live, indices, old)
        whole = loops.digest_dense(live, offset)
        moved = loops.digest_changes(indices, old, values, offset)
        loops.scatter(live, indices, values)
        after = loops.digest_dense(live, offset)
        assert all((w + m) % 2**64 == a for w, m, a in zip(whole, moved, after, strict=True))
        results.append((live.tolist(), whole, moved))
    assert results[0] == results[1]


@pytest.mark.parametrize("shift", [0, 1, 4, 7, 13])
def test_both_code_gaps_alike_and_refuse_what_is_not_whole(shift: int) -> None:
    rng = np.random.default_rng(shift)
    gaps = rng.geometric(1 / 900, 500).astype(np.int64) - 1
    coded = []
    for loops in (COMPILED, PLAIN):
        quotients = np.empty(500 + int((gaps >> shift).sum()) // 255, np.uint8)
        low = np.zeros((500 * shift + 7) // 8, np.uint8)
        size = loops.encode_gaps(gaps, shift, quotients, low)
        back = np.empty(500, np.int64)
        assert loops.decode_gaps(quotients[:size], low, shift, back)
        assert np.array_equal(back, gaps)
        for broken in (quotients[: size - 1], np.append(quotients[:size], np.uint8(255))):
            assert not loops.decode_gaps(broken, low, shift, back)
        assert not loops.decode_gaps(quotients[:size], low, shift, np.empty(499, np.int64))
        coded.append((quotients[:size].tolist(), low.tolist()))
    assert coded[0] == coded[1]


@pytest.mark.parametrize("width", WIDTHS[:3])
def test_both_step_along_the_line_of_floats_alike(width: type) -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, np.iinfo(width).max, 400, dtype=width, endpoint=True)
    new = old + rng.choice(np.array([1, -1, 2, 3, 200, -90], np.int64), 400).astype(width)
    new[::7] = rng.integers(0, np.iinfo(width).max, new[::7].size, dtype=width)
    coded = []
    for loops in (COMPILED, PLAIN):
        signs, places = np.zeros(50, np.uint8), np.empty(400, np.int64)
        sizes, absolutes = np.empty(400, np.uint8), np.empty(400, width)
        exceptions, whole = loops.encode_steps(old, new, signs, places, sizes, absolutes)
        back = np.empty(400, width)
        kept = (places[:exceptions], sizes[:exceptions], absolutes[:whole])
        loops.decode_steps(old, signs, *kept, back)
        assert np.array_equal(back, new)
        coded.append([signs.tolist(), *(k.tolist() for k in kept)])
    assert coded[0] == coded[1]


def test_both_split_and_join_rotated_patterns_alike() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    halves = []
    for loops in (COMPILED, PLAIN):
        top, rest = np.empty(2**16, np.uint8), np.empty(2**16, np.uint8)
        loops.split_rotated(bits, top, rest)
        back = np.empty(2**16, np.uint16)
        loops.join_rotated(top, rest, back)
        assert np.array_equal(back, bits)
        halves.append((top.tolist(), rest.tolist()))
    assert halves[0] == halves[1]


def run(
    loops: Kernels, new: BitArray, shadow: BitArray, room: int
) -> tuple[IndexArray, BitArray, BitArray, BitArray]:
    """Call until the end is reached, with twice the room each time. The array is cut into three
    stretches, the second of them empty."""
    cut = new.size // 3
    pairs = np.array(
        [addressed(new, shadow, *ends) for ends in ((0, cut), (cut, cut), (cut, None))]
    )
    ends = np.full(3, -1, np.int64)
    indices = np.empty(room, np.int32)
    values, old = np.empty(room, shadow.dtype), np.empty(room, shadow.dtype)
    row = element = count = 0
    while True:
        row, element, count = loops.find_changes(
            pairs, new.dtype, row, element, indices, values, old, count, ends
        )
        if row == 3:
            below = np.searchsorted(indices[:count], cut)
            assert ends.tolist() == [below, below, count]
            return indices[:count], values[:count], old[:count], shadow
        more = np.empty(indices.size, indices.dtype)
        indices = np.concatenate([indices, more])
        values = np.concatenate([values, more.astype(values.dtype)])
        old = np.concatenate([old, more.astype(old.dtype)])


def addressed(new: BitArray, shadow: BitArray, begin: int, end: int | None) -> list[int]:
    """A row of pairs."""
    a, b = new[begin:end], shadow[begin:end]
    return [a.ctypes.data, b.ctypes.data, a.size, begin]
