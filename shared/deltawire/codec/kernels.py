"""The inner loops, behind one door: compiled by numba where it is installed, else numpy.

``load()`` gives a module with the functions of ``Kernels``. Both modules pass the same tests with
equal results; numba's is several times faster on everything but the diff. Nothing is compiled at
import: each loop compiles at its first call and is kept in numba's cache where one is writable.
"""

from functools import cache
from typing import Protocol, cast

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray


class Kernels(Protocol):
    """Loops over flat arrays. None of them checks bounds: callers have."""

    def find_changes(
        self,
        new: BitArray,
        shadow: BitArray,
        first: int,
        indices: IndexArray,
        values: BitArray,
        old: BitArray,
        count: int,
    ) -> tuple[int, int]:
        """Compare from element `first`; write what differs at `count` and on, update the shadow.

        Returns (next element, count). Stops early when the outputs may overflow: grow, call again.
        """
        ...

    def find_rounded_changes(
        self,
        master: BitArray,
        shadow: BitArray,
        first: int,
        indices: IndexArray,
        values: BitArray,
        old: BitArray,
        count: int,
    ) -> tuple[int, int]:
        """``find_changes`` of fp32 bits rounded to bf16 (to nearest, ties to even) in passing.

        A NaN keeps its sign and upper payload and becomes quiet, whatever torch's cast makes of it.
        """
        ...

    def digest_dense(self, bits: BitArray, offset: int) -> tuple[int, int]:
        """Both lanes of digest.py over elements at positions offset, offset + 1, ..."""
        ...

    def digest_changes(
        self, indices: IndexArray, old: BitArray, values: BitArray, offset: int
    ) -> tuple[int, int]:
        """What both lanes gain when `old` becomes `values` at offset + indices."""
        ...

    def gather(self, bits: BitArray, indices: IndexArray, out: BitArray) -> None:
        """``out[:] = bits[indices]``"""
        ...

    def scatter(self, bits: BitArray, indices: IndexArray, values: BitArray) -> None:
        """``bits[indices] = values``"""
        ...


@cache
def load(*, compiled: bool = True) -> Kernels:
    """The compiled kernels, or the numpy ones when numba is absent or not asked for."""
    from deltawire.codec import kernels_numpy

    if compiled:
        try:
            from deltawire.codec import kernels_numba
        except ImportError:
            pass
        else:
            return cast(Kernels, kernels_numba)
    return cast(Kernels, kernels_numpy)


def words_of(bits: BitArray) -> BitArray:
    """The same memory as 64-bit words, without the last few elements that fill no whole word."""
    per_word = 8 // bits.itemsize
    return bits[: bits.size // per_word * per_word].view(np.uint64)
