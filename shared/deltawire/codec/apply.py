"""Patches onto live tensors, in place, in O(changes).

A staged patch is absolute (positions and new bits), so applying it again does no harm. The order
that keeps the pause short: decode and ``gather`` old values while tokens flow, then ``scatter`` in
the pause; ``reverse`` is the undo.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray, IndexArray, bits_of, flat_bits, word_of
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.errors import LayoutMismatch


class LiveTensors:
    """Live weights by stored name, as a source of old values and a target of patches.

    Holds references, no copies. CPU tensors are touched through numba or numpy, others on their
    device. A tensor that is not contiguous is reached through an index of its own strides.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], layout: Layout) -> None:
        """Raises LayoutMismatch unless every stored tensor is there with its shape and dtype."""
        given: Mapping[str, torch.Tensor] = dict(named_tensors)
        self.layout = layout
        self._tensors: dict[str, torch.Tensor] = {}
        for name in layout:
            self._tensors[name] = _fitting(given.get(name), name, layout)

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        """The bit patterns at these flat positions, on the host."""
        tensor = self._tensors[name]
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            live = bits_of(tensor)
            out = np.empty(indices.size, live.dtype)
            kernels.load().gather(live, indices, out)
            return out
        where = torch.from_numpy(indices).to(tensor.device, torch.int64)
        return bits_of(tensor.detach().flatten()[where])

    def read(self, name: str, begin: int, end: int) -> BitArray:
        """The bit patterns of elements [begin, end): a view of a contiguous CPU tensor."""
        return bits_of(self._tensors[name].detach().reshape(-1)[begin:end])

    def scatter(self, patch: SparsePatch) -> None:
        """Write one patch. Positions and dtype were checked when it was decoded."""
        tensor = self._tensors[patch.name].detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            kernels.load().scatter(bits_of(tensor), patch.indices, patch.values)
            return
        where = torch.from_numpy(patch.indices).to(tensor.device, torch.int64)
        signed = torch.from_numpy(patch.values.view(f"<i{patch.values.itemsize}"))
        bits = signed.to(tensor.device)
        if tensor.is_contiguous():
            flat_bits(tensor).index_copy_(0, where, bits)
        else:
            places = torch.unravel_index(where, tensor.shape)
            tensor.view(bits.dtype).index_put_(places, bits)

    def write(self, name: str, bits: BitArray) -> None:
        """Replace a whole tensor, for anchors."""
        tensor = self._tensors[name].detach()
        if bits.size != tensor.numel() or bits.dtype != self.layout[name].bits:
            raise LayoutMismatch(f"{name}: {bits.size} elements of {bits.dtype} do not fit it")
        signed = torch.from_numpy(bits.view(f"<i{bits.itemsize}"))
        tensor.view(signed.dtype).copy_(signed.view(tensor.shape))

    def named_bits(self) -> Iterable[tuple[str, BitArray]]:
        """Every tensor's bits in layout order, for a full digest."""
        return ((name, bits_of(tensor)) for name, tensor in self._tensors.items())


def gather(tensors: LiveTensors, patches: Iterable[SparsePatch]) -> list[SparsePatch]:
    """The patches with the old values of `tensors` filled in where they are missing."""
    return [
        patch
        if patch.old is not None
        else replace(patch, old=tensors.gather(patch.name, patch.indices))
        for patch in patches
    ]


def scatter(tensors: LiveTensors, patches: Iterable[SparsePatch]) -> None:
    """Write every patch in place. This is the pause."""
    for patch in patches:
        tensors.scatter(patch)


def reverse(patches: Sequence[SparsePatch]) -> list[SparsePatch]:
    """The patches that undo these: old and new change places, last patch first."""
    undo: list[SparsePatch] = []
    for patch in reversed(patches):
        if patch.old is None:
            raise LayoutMismatch(f"{patch.name}: no old values; gather them before the scatter")
        undo.append(replace(patch, values=patch.old, old=patch.values))
    return undo


def _fitting(tensor: torch.Tensor | None, name: str, layout: Layout) -> torch.Tensor:
    wanted = layout[name]
    if tensor is None:
        raise LayoutMismatch(f"{name} is in the run's layout and not in the model")
    if tuple(tensor.shape) != wanted.shape or word_of(tensor.dtype) != wanted.dtype:
        raise LayoutMismatch(
            f"{name}: {wanted.dtype} {wanted.shape} expected, "
            f"found {word_of(tensor.dtype)} {tuple(tensor.shape)}"
        )
    return tensor
