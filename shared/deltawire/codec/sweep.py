"""One pass over many tensors of a kind: where their bits lie, and room for what differs.

The loops get a table of addresses and are called once. A call for each tensor would cost more than
to compare a small one: the pass itself keeps emptying the caches that Python lives in.
"""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from deltawire.codec.bits import BitArray, IndexArray, bits_of
from deltawire.codec.kernels import Kernels
from deltawire.codec.patch import SparsePatch, TensorLayout

Number = TypeVar("Number", bound=np.integer[Any])

ROOM = 1 << 19
"""Changes there is room for at first; numpy's loops need 2^18 at a time."""
_OWNS_MEMORY = (torch.Tensor, torch.nn.Parameter)
"""Types whose elements lie at ``data_ptr()``. A wrapper may say so and hold none."""


class Sweep:
    """Tensors of one kind and what was found in them, one after another in the same arrays.

    Pages are touched only as they fill, so generous room costs nothing.
    """

    def __init__(self, loops: Kernels, like: TensorLayout, *, rounds: bool, room: int) -> None:
        """All tensors are of the types of `like`; with `rounds`, fp32 that becomes bf16."""
        self._find = loops.find_changes
        self._source = np.dtype(np.uint32) if rounds else like.bits
        self._room: tuple[IndexArray, BitArray, BitArray] = (
            np.empty(room, like.index_type),
            np.empty(room, like.bits),
            np.empty(room, like.bits),
        )
        self._rows: list[tuple[int, int, int, int]] = []
        self._held: list[torch.Tensor | BitArray] = []
        self.found = 0

    def add(self, source: torch.Tensor, shadow: int, *, begin: int = 0) -> None:
        """Queue a tensor: all of its elements, against the shadow's at an address. Positions
        count from `begin`."""
        if type(source) in _OWNS_MEMORY and source.is_cpu and source.is_contiguous():
            address = source.data_ptr()
            self._held.append(source)
        else:
            bits = bits_of(source)
            address = bits.ctypes.data
            self._held.append(bits)
        self._rows.append((address, shadow, source.numel(), begin))

    def run(self) -> list[int]:
        """Compare what is queued, and move the shadow. For each row, how much was found by then."""
        pairs = np.array(self._rows, np.int64).reshape(-1, 4)
        ends = np.empty(len(pairs), np.int64)
        row = element = 0
        while True:
            row, element, self.found = self._find(
                pairs, self._source, row, element, *self._room, self.found, ends
            )
            if row == len(pairs):
                break
            self._grow()
        self._rows.clear()
        self._held.clear()
        found: list[int] = ends.tolist()
        return found

    def patch(self, name: str, begin: int, end: int) -> SparsePatch:
        """Found changes [begin, end), which are one tensor's. Views."""
        indices, values, old = self._room
        return SparsePatch(
            name=name, indices=indices[begin:end], values=values[begin:end], old=old[begin:end]
        )

    def _grow(self) -> None:
        indices, values, old = self._room
        self._room = _doubled(indices), _doubled(values), _doubled(old)


def _doubled(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    larger = np.empty(2 * array.size, array.dtype)
    larger[: array.size] = array
    return larger
