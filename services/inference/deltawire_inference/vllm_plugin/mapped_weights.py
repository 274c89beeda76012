"""The live weights of a model that lies whole on this rank, as the codec asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from deltawire.codec.bits import BitArray, IndexArray, bits_of, tensor_of
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.errors import LayoutMismatch
from deltawire_inference.vllm_plugin.live import read_tensor
from deltawire_inference.vllm_plugin.receiver import Receiver


class MappedWeights:
    """An OldValues that reads through the map, in the worker itself."""

    def __init__(self, receiver: Receiver, layout: Layout) -> None:
        self._receiver, self._layout = receiver, layout

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        """See OldValues.

        Raises:
            UnmappableName: The tensor cannot be patched.
            LayoutMismatch: Some of it lies on another rank.
        """
        where = self._receiver.map
        where.require_mapped([name])
        out = torch.zeros(indices.size, dtype=where.specs[name].dtype)
        held = torch.zeros(indices.size, dtype=torch.bool)
        for placed in where.locate(name, torch.from_numpy(indices.astype(np.int64))):
            flat = self._receiver.live.flat(placed.target)
            kept = slice(None) if placed.kept is None else placed.kept
            out[kept] = flat[placed.offsets.to(flat.device)].to(out.dtype).cpu()
            held[kept] = True
        if not bool(held.all()):
            raise LayoutMismatch(
                f"{name}: part of it is on another rank; with tensor parallelism run the deltawire "
                "inference service in front of vLLM"
            )
        return bits_of(out)

    def read(self, name: str, begin: int, end: int) -> BitArray:
        """See OldValues."""
        return bits_of(read_tensor(self._receiver.live, self._receiver.map, name)[begin:end])

    def named_bits(self) -> Iterator[tuple[str, BitArray]]:
        """Every tensor's bits in layout order, for a full digest."""
        for name in self._layout:
            yield name, self.read(name, 0, self._layout[name].numel)

    def changes(
        self, patches: list[SparsePatch]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Decoded patches as the receiver takes them: (name, int64 indices, values)."""
        for patch in patches:
            indices = torch.from_numpy(patch.indices.astype(np.int64))
            yield (
                patch.name,
                indices,
                tensor_of(patch.values.copy(), self._layout[patch.name].dtype),
            )
