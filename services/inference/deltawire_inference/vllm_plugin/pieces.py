"""Where one rectangular part of a checkpoint tensor lies in a runtime tensor: pure arithmetic.

A loader that slices, fuses, pads, transposes or splits by expert copies strided views. A view is an
offset and a stride per dimension, so such a copy is an **affine** map from flat checkpoint indices
to storage offsets, a few integers per tensor. Only what lost its strides on the way (a
concatenation, say) needs a `TablePiece` with one number per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch


class Located(NamedTuple):
    """Offsets into one runtime storage for those of the asked indices that lie in it."""

    offsets: torch.Tensor
    """int64 [k], element offsets into the target's storage, in the order of the indices."""
    kept: torch.Tensor | None
    """bool [m], which of the m indices asked for were located; None when all were (k == m)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinePiece:
    """A strided box of the checkpoint tensor that is a strided box of the runtime storage.

    Dimensions are merged and ordered by falling source stride. Rows 4..7 of an [8, 8] tensor that
    open a fused runtime tensor: `sizes=(32,)`, `source_strides=(1,)`, `source_offset=32`,
    `target_strides=(1,)`, `target_offset=0`: one addition per index.
    """

    target: int
    """Which runtime tensor: an index into `CheckpointMap.targets`."""
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    source_offset: int
    target_offset: int

    @property
    def elements(self) -> int:
        """How many checkpoint elements the piece holds."""
        return torch.Size(self.sizes).numel()

    def covers(self, elements: int) -> bool:
        """Whether the piece is the whole of a tensor of `elements`, in order (one stride)."""
        return self.sizes == (elements,) and self.source_strides == (1,) and self.source_offset == 0

    def locate(self, indices: torch.Tensor) -> Located:
        """Map sorted int64 flat checkpoint indices [m]; those outside the box are dropped."""
        if len(self.sizes) == 1 and self.source_strides[0] == 1:
            return self._locate_run(indices)
        rest = indices - self.source_offset
        offsets = torch.full_like(indices, self.target_offset)
        inside = torch.ones_like(indices, dtype=torch.bool)
        for size, source, target in zip(
            self.sizes, self.source_strides, self.target_strides, strict=True
        ):
            quotient = rest if source == 1 else torch.div(rest, source, rounding_mode="floor")
            rest = rest - quotient * source
            inside &= (quotient >= 0) & (quotient < size)
            offsets += quotient * target
        if self.source_strides[-1] != 1:
            inside &= rest == 0
        return Located(offsets[inside], inside)

    def _locate_run(self, indices: torch.Tensor) -> Located:
        """The common case, one contiguous run of the source: two binary searches, no test per
        index."""
        bounds = torch.tensor([self.source_offset, self.source_offset + self.sizes[0]])
        first, last = torch.searchsorted(indices, bounds).tolist()
        run = indices[first:last]
        offsets = (run - self.source_offset) * self.target_strides[0] + self.target_offset
        if last - first == indices.numel():
            return Located(offsets, None)
        kept = torch.zeros_like(indices, dtype=torch.bool)
        kept[first:last] = True
        return Located(offsets, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePiece:
    """An explicit list of element places, for copies whose source was rebuilt on the way."""

    target: int
    source: torch.Tensor
    """int64 [n], checkpoint indices, rising."""
    offsets: torch.Tensor
    """int64 [n], the storage offset of each."""

    @property
    def elements(self) -> int:
        """How many checkpoint elements the piece holds."""
        return self.source.numel()

    def covers(self, elements: int) -> bool:
        """A table never promises order, so dense copies go element by element."""
        del elements
        return False

    def locate(self, indices: torch.Tensor) -> Located:
        """Map int64 flat checkpoint indices [m]; those not in the table are dropped."""
        at = torch.searchsorted(self.source, indices).clamp_(max=self.source.numel() - 1)
        kept = self.source[at] == indices
        return Located(self.offsets[at[kept]], kept)


Piece = AffinePiece | TablePiece


def affine_piece(
    target: int, *, destination: torch.Tensor, source: torch.Tensor
) -> AffinePiece | None:
    """The piece that copying `source` to `destination` describes, both views of equal shape.

    None when the copy is not one-to-one on the source: it broadcasts or reads overlapping places.
    """
    boxes = sorted(
        (
            (source_stride, target_stride, size)
            for size, source_stride, target_stride in zip(
                source.shape, source.stride(), destination.stride(), strict=True
            )
            if size != 1
        ),
        reverse=True,
    )
    merged: list[tuple[int, int, int]] = []
    for source_stride, target_stride, size in boxes:
        if source_stride == 0:
            return None
        if merged and merged[-1][:2] == (source_stride * size, target_stride * size):
            merged[-1] = (source_stride, target_stride, size * merged[-1][2])
        else:
            merged.append((source_stride, target_stride, size))
    if any(outer[0] < inner[0] * inner[2] for outer, inner in pairwise(merged)):
        return None
    source_strides, target_strides, sizes = zip(*(merged or [(1, 1, 1)]), strict=True)
    return AffinePiece(
        target=target,
        sizes=sizes,
        source_strides=source_strides,
        target_strides=target_strides,
        source_offset=int(source.storage_offset()),
        target_offset=int(destination.storage_offset()),
    )
