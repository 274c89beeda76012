"""The inner loops, behind one door: compiled by numba where it is installed, else numpy.

``load()`` gives a module with the functions of ``Kernels``. Both modules pass the same tests with
equal results; numba's is several times faster on everything but the diff. Nothing is compiled at
import: each loop compiles at its first call and is kept in numba's cache where one is writable.
"""

from functools import cache
from typing import Any, Protocol, cast

import numpy as np

from deltawire.codec.bits import BitArray, IndexArray


class Kernels(Protocol):
    """Loops over flat arrays. None of them checks bounds: callers have."""

    def find_changes(
        self,
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
        """Compare weights with the shadow; write what differs at `count` and on, move the shadow.

        A row of `pairs` [n, 4] is a stretch of both: the address of the weights' bits, of type
        `source`; that of the shadow's, of the type of `values`; elements; the position of the
        first. Starts at `element` of `row`. Puts the count at its end into `ends` for each row.

        Weights of uint32 beside a shadow of uint16 are fp32, rounded to bf16 in passing (to
        nearest, ties to even). A NaN keeps its sign and upper payload and becomes quiet, whatever
        torch's cast makes of it.

        Returns (row, element, count), where row is n at the end. Stops early when the outputs may
        overflow: grow, call again.
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

    def encode_gaps(self, gaps: IndexArray, shift: int, quotients: BitArray, low: BitArray) -> int:
        """Additive escapes: gap = 255 q + r of ``gap >> shift`` as q bytes 255 and one byte r.

        The low `shift` bits go to `low`, packed from the lowest bit up. Returns quotient bytes.
        """
        ...

    def decode_gaps(self, quotients: BitArray, low: BitArray, shift: int, gaps: IndexArray) -> bool:
        """The inverse; False unless the bytes hold exactly ``gaps.size`` whole gaps."""
        ...

    def encode_steps(
        self,
        old: BitArray,
        new: BitArray,
        signs: BitArray,
        places: IndexArray,
        sizes: BitArray,
        absolutes: BitArray,
    ) -> tuple[int, int]:
        """Steps on the ordered line of floats. Sign bits (set: up) for all; for each step that is
        not one unit its place in the list and its size, 255 for one above 254, whose new bits are
        kept whole. Returns (exceptions, absolutes)."""
        ...

    def decode_steps(
        self,
        old: BitArray,
        signs: BitArray,
        places: IndexArray,
        sizes: BitArray,
        absolutes: BitArray,
        new: BitArray,
    ) -> None:
        """The inverse. Places are checked to lie inside, and 255s to be as many as absolutes."""
        ...

    def class_gaps(
        self,
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
        """Rank the changes among the elements of their class, over the base bits of a stretch that
        begins at position `begin`.

        For each change from `first` on that lies in it: its class ``bits >> shift & mask`` and its
        gap in ranks after the last change of the class. `seen` counts elements, `last` holds the
        rank of the last change, both by class and carried from stretch to stretch. Returns the
        next change.
        """
        ...

    def class_positions(
        self,
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
        """The inverse: positions, in order, of the changes whose ranks stand in runs by class.

        `cursors` and `run_ends` bound what is left of each class's run in `ranks`; `sources` says
        which place of `ranks` a position came from. Returns how many were found so far.
        """
        ...

    def split_rotated(self, bits: BitArray, top: BitArray, rest: BitArray) -> None:
        """16-bit patterns rotated left by one, into upper and lower bytes."""
        ...

    def join_rotated(self, top: BitArray, rest: BitArray, bits: BitArray) -> None:
        """The inverse."""
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
