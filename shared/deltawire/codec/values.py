"""New bit patterns of changed elements, coded two ways; the encoder keeps the smaller.

``steps``: relative to the old value. On the ordered line of floats (negative ones mirrored) an
optimizer moves a bf16 weight by one unit nine times in ten: one raw sign bit, plus the exceptions
(where in the list, and how far; beyond 254 units the new bits whole). Integer arithmetic, so exact,
and safe for NaN, infinities and -0.0. ``absolute``: the lowest byte raw, the others in one zstd
frame; needs no old value. Either way a file holds at least one raw bit for each change it claims.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray
from deltawire.codec.positions import (
    gaps_of,
    pack_gaps,
    positions_of,
    squeeze,
    unpack_gaps,
    unsqueeze,
)
from deltawire.protocol.errors import MalformedObject

MAX_STEP_BYTES = 4
"""Wider elements have no line in 64-bit arithmetic; they are coded absolute."""
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Values of one segment as steps from the old ones."""

    signs: BitArray
    """One bit a change; set: up."""
    places: bytes
    """zstd over the gaps of the exceptions' places in the list."""
    sizes: bytes
    """zstd over a byte an exception: units, 255 for absolute."""
    absolutes: BitArray
    """Whole new bits where a step is above 254 units, as bytes."""
    exceptions: int
    whole: int

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.signs.size + len(self.places) + len(self.sizes) + self.absolutes.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Absolute:
    """Values of one segment as they are."""

    low: BitArray
    """The lowest byte of each."""
    high: bytes
    """zstd over the other bytes, byte plane by byte plane from the second up."""

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.low.size + len(self.high)


def encode_steps(old: BitArray, new: BitArray) -> Steps:
    """Any width: 8-bit floats and integers have such a line as well."""
    count = new.size
    signs = np.empty(sign_bytes(count), np.uint8)
    places, sizes = np.empty(count, np.int64), np.empty(count, np.uint8)
    absolutes = np.empty(count, new.dtype)
    exceptions, whole = kernels.load().encode_steps(old, new, signs, places, sizes, absolutes)
    quotients, _ = pack_gaps(gaps_of(places[:exceptions]), 0)
    return Steps(
        signs=signs,
        places=squeeze(quotients),
        sizes=squeeze(sizes[:exceptions]),
        absolutes=absolutes[:whole].view(np.uint8),
        exceptions=exceptions,
        whole=whole,
    )


def decode_steps(steps: "PackedSteps", old: BitArray, *, name: str) -> BitArray:
    """The new bits. Raises MalformedObject when the streams contradict each other."""
    count = old.size
    if not steps.whole <= steps.exceptions <= count:
        raise MalformedObject(
            f"{name}: {steps.whole} absolutes, {steps.exceptions} exceptions, {count} changes"
        )
    quotients = unsqueeze(
        steps.places,
        least=steps.exceptions,
        most=steps.exceptions + count // 255,
        name=name,
    )
    gaps = unpack_gaps(quotients, _NOTHING, 0, steps.exceptions, name=name)
    places = positions_of(gaps, count, name=name)
    sizes = unsqueeze(steps.sizes, least=steps.exceptions, most=steps.exceptions, name=name)
    if int(np.count_nonzero(sizes == 255)) != steps.whole:
        raise MalformedObject(f"{name}: {steps.whole} absolute values announced, others found")
    new = np.empty(count, old.dtype)
    kernels.load().decode_steps(
        old, steps.signs, places, sizes, steps.absolutes.view(old.dtype), new
    )
    return new


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSteps:
    """``Steps`` as they were read from a file, lengths of the raw streams already right."""

    signs: BitArray
    places: BitArray
    sizes: BitArray
    absolutes: BitArray
    exceptions: int
    whole: int


def encode_absolute(new: BitArray) -> Absolute:
    """Split into byte planes."""
    planes = new.view(np.uint8).reshape(-1, new.itemsize).T
    return Absolute(
        low=np.ascontiguousarray(planes[0]),
        high=squeeze(np.ascontiguousarray(planes[1:]).reshape(-1)),
    )


def decode_absolute(low: BitArray, high: BitArray, dtype: np.dtype[Any], *, name: str) -> BitArray:
    """The new bits. Raises MalformedObject."""
    rest = low.size * (dtype.itemsize - 1)
    planes = np.empty((low.size, dtype.itemsize), np.uint8)
    planes[:, 0] = low
    planes[:, 1:] = unsqueeze(high, least=rest, most=rest, name=name).reshape(-1, low.size).T
    bits: BitArray = planes.reshape(-1).view(dtype)
    return bits


def sign_bytes(count: int) -> int:
    """Bytes that one bit a change takes."""
    return (count + 7) // 8
