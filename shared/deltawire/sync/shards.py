"""Which part of a tensor a rank holds, and where its elements stand in the whole. Pure.

A DTensor's placements cut dimensions into chunks of ceil(size / ranks) along each mesh dimension,
the last ones shorter or empty. A part is therefore a box: one [begin, end) per dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from deltawire.codec.bits import IndexArray
from deltawire.protocol.errors import LayoutMismatch

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's box of one tensor. Empty where another rank holds the same copy and speaks for it.

    Example: rank 1 of 2 holds rows 4 to 6 of a [7, 3] tensor:
    ``Part(shape=(7, 3), begin=(4, 0), end=(7, 3))``.
    """

    shape: tuple[int, ...]
    """Of the whole tensor; a scalar counts as [1]."""
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def sides(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(e - b for b, e in zip(self.begin, self.end, strict=True))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sides)

    @property
    def box(self) -> tuple[slice, ...]:
        """To index the whole tensor with."""
        return tuple(slice(b, e) for b, e in zip(self.begin, self.end, strict=True))

    def positions(self, local: IndexArray) -> Positions:
        """Flat positions in the box -> flat positions in the whole tensor."""
        inside = np.unravel_index(local, self.sides)
        moved = tuple(axis + b for axis, b in zip(inside, self.begin, strict=True))
        return np.ravel_multi_index(moved, self.shape).astype(np.int64)


def part_of(
    shape: Sequence[int],
    placements: Sequence[object],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Part:
    """The part of a tensor at one place of the mesh. Raises LayoutMismatch for other placements
    than Shard and Replicate."""
    begin, end = [0] * len(shape), list(shape)
    speaks = True
    for placement, ranks, at in zip(placements, mesh_shape, coordinate, strict=True):
        if type(placement) is Replicate:
            speaks = speaks and at == 0
        elif type(placement) is Shard:
            dim = placement.dim
            chunk = -(-(end[dim] - begin[dim]) // ranks)
            first = min(begin[dim] + at * chunk, end[dim])
            begin[dim], end[dim] = first, min(first + chunk, end[dim])
        else:
            raise LayoutMismatch(f"cannot publish a tensor placed {placement}; Shard or Replicate")
    return _whole_or_nothing(shape, begin, end, speaks=speaks)


def part_here(tensor: torch.Tensor, *, rank: int) -> Part:
    """This rank's part of a parameter: of a DTensor by its mesh, else all of it on rank 0."""
    shape = tuple(tensor.shape) or (1,)
    if not isinstance(tensor, DTensor):
        return _whole_or_nothing(shape, [0] * len(shape), shape, speaks=rank == 0)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return _whole_or_nothing(shape, shape, shape, speaks=False)
    return part_of(shape, tensor.placements, mesh.shape, coordinate)


def local_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The elements of a part, flat; no data is moved between ranks."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().reshape(-1)
    return flat if part.numel == flat.numel() else flat[:0]


def _whole_or_nothing(
    shape: Sequence[int], begin: Sequence[int], end: Sequence[int], *, speaks: bool
) -> Part:
    nothing = (0,) * len(shape)
    return Part(
        shape=tuple(shape),
        begin=tuple(begin) if speaks else nothing,
        end=tuple(end) if speaks else nothing,
    )
