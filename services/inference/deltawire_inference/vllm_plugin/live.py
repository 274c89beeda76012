"""One rank's runtime tensors, read and written through the map. Nothing is copied aside.

All values are compared as bits. A runtime tensor may be wider than the checkpoint's dtype (a
float32 router bias): values are cast on the way in, as vLLM's loader does, and back on the way
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from deltawire.protocol.errors import ReplicaBroken
from deltawire_inference.vllm_plugin.checkpoint_map import CheckpointMap
from deltawire_inference.vllm_plugin.pieces import AffinePiece, Piece
from deltawire_inference.vllm_plugin.trace import runtime_tensors, storage_elements

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: NaN equals itself, -0.0 is not 0.0."""
    return tensor.view(_BITS[tensor.element_size()])


class LiveModel:
    """The flat storages behind a model's runtime tensors, in the order of a map's targets."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tensors = runtime_tensors(model)
        self._addresses = {name: t.data_ptr() for name, t in self._tensors.items()}
        self._flat = [_whole_storage(t) for t in self._tensors.values()]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._flat[0].device

    def flat(self, target: int) -> torch.Tensor:
        """The whole storage of a target as a 1-D tensor of its dtype."""
        return self._flat[target]

    def require_unmoved(self) -> None:
        """Refuse to write where the model no longer is.

        Raises:
            ReplicaBroken: A reload, a sleep or a rearrangement of experts moved a tensor.
        """
        now = {name: t.data_ptr() for name, t in runtime_tensors(self._model).items()}
        if now != self._addresses:
            moved = sorted(set(now.items()) ^ set(self._addresses.items()))[0][0]
            raise ReplicaBroken(
                f"{moved} moved in memory since the map was learned; restart the server"
            )


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), 0, (storage_elements(tensor),), (1,))


def read_tensor(live: LiveModel, where: CheckpointMap, name: str) -> torch.Tensor:
    """The live value of one checkpoint tensor [elements]; 0 where it is on another rank."""
    spec = where.specs[name]
    out = torch.zeros(spec.elements, dtype=spec.dtype)
    for piece in where.pieces.get(name, ()):
        if _is_strided(where, piece):
            source, destination = _views(live, piece, out)
            source.copy_(destination)
        else:
            index, offsets = _elements(where, piece, spec.elements)
            out[index] = live.flat(piece.target)[offsets].to(spec.dtype).cpu()
    return out


def write_tensor(live: LiveModel, where: CheckpointMap, name: str, value: torch.Tensor) -> None:
    """Copy one whole checkpoint tensor into its places."""
    value = value.contiguous().view(-1)
    for piece in where.pieces.get(name, ()):
        if _is_strided(where, piece):
            source, destination = _views(live, piece, value)
            destination.copy_(source)
        else:
            index, offsets = _elements(where, piece, value.numel())
            flat = live.flat(piece.target)
            flat.index_copy_(0, offsets.to(flat.device), value[index].to(flat))


def count_differences(live: LiveModel, where: CheckpointMap, name: str, value: torch.Tensor) -> int:
    """How many places of one checkpoint tensor hold other bits than `value`."""
    value = value.contiguous().view(-1)
    differences = 0
    for piece in where.pieces.get(name, ()):
        if _is_strided(where, piece):
            expected, found = _views(live, piece, value)
        else:
            index, offsets = _elements(where, piece, value.numel())
            flat = live.flat(piece.target)
            expected, found = value[index], flat[offsets.to(flat.device)]
        differences += int((bits(found) != bits(expected.to(found))).sum())
    return differences


def differing(
    live: LiveModel, where: CheckpointMap, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What turns the live weights into `tensors`: (name, int64 indices [m], values [m]) per tensor.

    Only places on this rank are compared; elements elsewhere are never reported.
    """
    for name, value in tensors:
        if name not in where.pieces:
            continue
        value = value.contiguous().view(-1)
        changed = torch.zeros(value.numel(), dtype=torch.bool)
        for piece in where.pieces[name]:
            if _is_strided(where, piece):
                expected, found = _views(live, piece, value)
                mask, _ = _views(live, piece, changed)
                mask.copy_(bits(found.to(value.dtype)).cpu() != bits(expected.contiguous()))
            else:
                index, offsets = _elements(where, piece, value.numel())
                found = live.flat(piece.target)[offsets].to(value.dtype).cpu()
                changed[index] = bits(found) != bits(value[index])
        indices = changed.nonzero().view(-1)
        yield name, indices, value[indices]


def _is_strided(where: CheckpointMap, piece: Piece) -> bool:
    return isinstance(piece, AffinePiece) and piece.target not in where.relayouts


def _views(live: LiveModel, piece: Piece, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The piece as two views of equal shape: of the checkpoint tensor, of the runtime storage."""
    assert isinstance(piece, AffinePiece)
    return (
        value.as_strided(piece.sizes, piece.source_strides, piece.source_offset),
        live.flat(piece.target).as_strided(piece.sizes, piece.target_strides, piece.target_offset),
    )


def _elements(
    where: CheckpointMap, piece: Piece, elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The piece element by element: (checkpoint indices int64 [k], storage offsets int64 [k])."""
    every = torch.arange(elements)
    offsets, kept = piece.locate(every)
    relayout = where.relayouts.get(piece.target)
    return every if kept is None else every[kept], (
        offsets if relayout is None else relayout.place(offsets)
    )


def share_of_rank(where: CheckpointMap, name: str, value: torch.Tensor, into: torch.Tensor) -> None:
    """Copy from one rank's `value` of a checkpoint tensor what that rank holds of it."""
    for piece in where.pieces.get(name, ()):
        if isinstance(piece, AffinePiece):
            box = (piece.sizes, piece.source_strides, piece.source_offset)
            into.as_strided(*box).copy_(value.as_strided(*box))
        else:
            into[piece.source] = value[piece.source]
