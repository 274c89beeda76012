"""Keys and values of the running rows: one padded tensor, rows packed at the front.

Rows 0..n-1 run, so that one decode step attends over a view and copies nothing. A row that leaves
is filled by the last one. The tensor grows by doubling and never shrinks.
"""

from dataclasses import dataclass

import torch

_FIRST_ROWS = 8
_FIRST_LENGTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one token occupies."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Of one token over all layers."""
        return self.layers * 2 * self.heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """`data` is [layers, 2, rows, heads, length, head_dim]; index 0 of axis 1 are the keys."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.data = self._allocate(0, 0)

    def reserve(self, *, rows: int, length: int) -> None:
        """Make room. What is there stays."""
        have_rows, have_length = self.data.shape[2], self.data.shape[4]
        if rows <= have_rows and length <= have_length:
            return
        grown = self._allocate(
            _doubled(max(have_rows, _FIRST_ROWS), rows),
            _doubled(max(have_length, _FIRST_LENGTH), length),
        )
        grown[:, :, :have_rows, :, :have_length] = self.data
        self.data = grown

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store new tokens: slots and positions [tokens], keys and values [tokens, heads, dim]."""
        self.data[layer, 0][slots, :, positions] = keys
        self.data[layer, 1][slots, :, positions] = values

    def take(self, slot: int, length: int) -> torch.Tensor:
        """A copy of a row's first tokens: [layers, 2, heads, length, head_dim]."""
        return self.data[:, :, slot, :, :length].clone()

    def put(self, slot: int, prefix: torch.Tensor, length: int) -> None:
        """Begin a row with the first `length` tokens of what `take` gave."""
        self.data[:, :, slot, :, :length] = prefix[:, :, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row into another slot."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def _allocate(self, rows: int, length: int) -> torch.Tensor:
        # Zeros, not garbage: a masked value still gets multiplied by 0, and 0 * NaN is NaN.
        shape = self.shape
        size = (shape.layers, 2, rows, shape.heads, length, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)


def _doubled(size: int, least: int) -> int:
    while size < least:
        size *= 2
    return size
