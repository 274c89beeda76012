"""Learn a checkpoint map by watching a model load a checkpoint that has no data.

`model.load_weights` is called once with meta tensors (shape and strides, no storage) under a
dispatch mode. vLLM's own code does all renaming, fusing, slicing by rank, padding and expert
numbering; the mode sees each write into a live tensor, notes the two views, and performs none of
them. So learning is O(number of tensors), touches no weight and needs no table per architecture.

Copies whose source lost its lineage (a loader concatenated two tensors) are learned in a second
run on int64 tensors that hold their own index: what would arrive is the map. Anything else that
reaches live storage (arithmetic, writes by other operators, loaders that fail) makes its names
opaque.

Not seen: code that writes through raw pointers. `verify.py` compares the result with the loaded
checkpoint bit for bit, and a map that fails it is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltawire_inference.vllm_plugin.checkpoint_map import CheckpointMap, Target, TensorSpec
from deltawire_inference.vllm_plugin.pieces import Piece, TablePiece, affine_piece

_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.clone.default})
"""A copy, cast or device move of checkpoint data is answered with a view: its lineage survives."""
_FILLS = frozenset(
    {torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor}
)
_NO_NAMES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that did not happen: both views, and whose data it would have been."""

    target: int
    destination: torch.Tensor
    source: torch.Tensor
    names: frozenset[str]
    lineage_kept: bool
    """The source is a view of a checkpoint tensor, so its strides say which elements it holds."""


@dataclass(slots=True)
class LoadNotes:
    """What one or more traced loads would have done to the live tensors."""

    copies: list[Copied] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)

    def add(self, other: LoadNotes) -> None:
        """Take in another run's notes."""
        self.copies += other.copies
        self.opaque |= other.opaque


class LoadTrace(TorchDispatchMode):
    """Notes every write to live storage instead of performing it, and tracks whose data it was."""

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Mapping[str, torch.Tensor],
        *,
        copies_keep_lineage: bool,
    ) -> None:
        super().__init__()
        self.notes = LoadNotes()
        self._targets = {storage_id(t): i for i, t in enumerate(targets)}
        self._sources = {storage_id(t): name for name, t in sources.items()}
        self._source_elements = {name: t.numel() for name, t in sources.items()}
        self._copies_keep_lineage = copies_keep_lineage
        self._constant: set[str] = set()
        self._lineage: dict[int, frozenset[str]] = {}
        self._made: set[int] = set()
        # Storage ids are addresses: what was seen must stay alive, or an id could come back.
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        names = _NO_NAMES.union(*map(self._names_of, inputs))
        for written in _written(func, args, kwargs):
            if self._note_write(func, written, args, names):
                return written
        if self._copies_keep_lineage and func in _COPIES and storage_id(inputs[0]) in self._sources:
            return inputs[0].view_as(inputs[0])
        out = func(*args, **kwargs)
        if names or not func._schema.is_mutable:
            self._follow(inputs, out, names)
        return out

    def _names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        storage = storage_id(tensor)
        if storage in self._sources:
            return frozenset({self._sources[storage]})
        return self._lineage.get(storage, _NO_NAMES)

    def _note_write(
        self,
        func: torch._ops.OpOverload,
        written: torch.Tensor,
        args: tuple[object, ...],
        names: frozenset[str],
    ) -> bool:
        """Note a write to live storage or over checkpoint data; False lets the operator run."""
        storage = storage_id(written)
        if storage in self._sources and func in _FILLS:
            self._note_fill(written)
            return True
        if (target := self._targets.get(storage)) is None:
            if names and storage not in self._made:
                self._refuse(names, f"written outside parameters and buffers by {func}")
                return True
            return False
        if func is torch.ops.aten.copy_.default:
            source = args[1]
            assert isinstance(source, torch.Tensor)
            if names - self._constant:
                kept = storage_id(source) in self._sources
                self.notes.copies.append(Copied(target, written, source, names, kept))
        else:
            self._refuse(names, f"written by {func}")
        return True

    def _note_fill(self, written: torch.Tensor) -> None:
        """A loader that zeroes its source loads a constant on this rank: nothing to follow."""
        name = self._sources[storage_id(written)]
        if written.numel() == self._source_elements[name]:
            self._constant.add(name)
        else:
            self._refuse({name}, "partly overwritten by its loader")

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        self.notes.opaque |= dict.fromkeys(names, reason)

    def _follow(self, inputs: list[torch.Tensor], out: object, names: frozenset[str]) -> None:
        """Results carry the names of what they were computed from."""
        known = {storage_id(t) for t in inputs}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = storage_id(tensor)
            if storage in self._sources or storage in self._targets:
                continue
            if storage not in known:
                self._made.add(storage)
            if names:
                self._lineage[storage] = self._lineage.get(storage, _NO_NAMES) | names
            self._alive.append(tensor)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor; works for meta tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def _written(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to, by its schema."""
    if not func._schema.is_mutable:
        return
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        value = values.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(value, torch.Tensor):
            yield value


@contextmanager
def _parameters_restored(model: torch.nn.Module) -> Iterator[None]:
    """Undo registrations: some loaders put a new parameter in place of the old one on each call."""
    registries: list[dict[str, Any]] = [
        registry for m in model.modules() for registry in (m._parameters, m._buffers)
    ]
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for now, old in zip(registries, before, strict=True):
            if old.keys() != now.keys() or any(old[key] is not now[key] for key in old):
                now.clear()
                now.update(old)


def runtime_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers with data, one name per storage (tied ones once), in model order."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            if tensor.numel():
                tensors.setdefault(storage_id(tensor), (name, tensor.data))
    return dict(tensors.values())


def learn_map(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> CheckpointMap:
    """Learn where every element of a checkpoint stands in a loaded model.

    Call it right after loading, before any update. The live weights are not touched.

    Args:
        model: A loaded vLLM model (anything with `load_weights`).
        specs: Name, shape and dtype of all tensors of the checkpoint it was loaded from.
    """
    live = runtime_tensors(model)
    targets = list(live.values())
    sources = {s.name: torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs}
    notes = _trace_load(model, targets, sources, lineage_choices=(True, False))
    pieces, lost = _affine_pieces(notes.copies)
    by_name = {spec.name: spec for spec in specs}
    opaque = dict(notes.opaque)
    if lost:
        tables, refused = _table_pieces(model, targets, [by_name[n] for n in sorted(lost)])
        pieces |= tables
        opaque |= refused
    opaque |= _narrowed(pieces, by_name, targets)
    return CheckpointMap(
        targets=tuple(
            Target(name=name, dtype=t.dtype, elements=storage_elements(t))
            for name, t in live.items()
        ),
        specs=by_name,
        pieces={n: tuple(found) for n, found in pieces.items() if found and n not in opaque},
        opaque=opaque,
    )


def _narrowed(
    pieces: Mapping[str, Sequence[Piece]],
    specs: Mapping[str, TensorSpec],
    targets: Sequence[torch.Tensor],
) -> dict[str, str]:
    """Names whose bits are lost on the way in: the old value could not be read back."""
    return {
        name: f"published as {specs[name].dtype}, served as {targets[piece.target].dtype}"
        for name, found in pieces.items()
        for piece in found
        if not _keeps_bits(specs[name].dtype, targets[piece.target].dtype)
    }


def _keeps_bits(published: torch.dtype, served: torch.dtype) -> bool:
    if published is served:
        return True
    if min(published.itemsize, served.itemsize) < 2:  # torch promotes no 8-bit floats
        return False
    return torch.promote_types(published, served) is served


def storage_elements(tensor: torch.Tensor) -> int:
    """How many elements of the tensor's dtype its whole storage holds."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _trace_load(
    model: torch.nn.Module,
    targets: Sequence[torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    *,
    lineage_choices: Sequence[bool],
) -> LoadNotes:
    """Trace all names at once; when the loader fails, name by name, so that one bad name does not
    spoil the others. Names whose own load fails are opaque."""
    whole, _ = _attempt_load(model, targets, sources, lineage_choices)
    if whole is not None:
        return whole
    notes = LoadNotes()
    for name, tensor in sources.items():
        single, error = _attempt_load(model, targets, {name: tensor}, lineage_choices)
        notes.add(single or LoadNotes(opaque={name: f"its loader fails: {error}"}))
    return notes


def _attempt_load(
    model: torch.nn.Module,
    targets: Sequence[torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    lineage_choices: Sequence[bool],
) -> tuple[LoadNotes | None, str]:
    """The notes of the first choice under which the loader runs to its end, or the last error."""
    error = ""
    for copies_keep_lineage in lineage_choices:
        trace = LoadTrace(targets, sources, copies_keep_lineage=copies_keep_lineage)
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], object] = model.load_weights  # type: ignore[assignment]
        try:
            with torch.no_grad(), _parameters_restored(model), trace:
                load(iter(sources.items()))
        except Exception as failure:  # noqa: BLE001  (a model's own loader may raise anything)
            error = f"{type(failure).__name__}: {failure}"[:160]
        else:
            return trace.notes, ""
    return None, error


def _affine_pieces(
    copies: Sequence[Copied],
) -> tuple[dict[str, list[Piece]], set[str]]:
    """Pieces of the copies that kept their strides, and the names of those that did not."""
    pieces: dict[str, list[Piece]] = {}
    lost: set[str] = set()
    for copied in copies:
        piece = None
        if copied.lineage_kept:
            source = copied.source.expand(copied.destination.shape)
            piece = affine_piece(copied.target, destination=copied.destination, source=source)
        if piece is None:
            lost |= copied.names
        else:
            (name,) = copied.names
            pieces.setdefault(name, []).append(piece)
    return {name: found for name, found in pieces.items() if name not in lost}, lost


def _table_pieces(
    model: torch.nn.Module, targets: Sequence[torch.Tensor], specs: Sequence[TensorSpec]
) -> tuple[dict[str, list[Piece]], dict[str, str]]:
    """Trace the same load on tensors of consecutive integers and read the map off what arrives."""
    starts = [0, *accumulate(spec.elements for spec in specs)]
    sources = {
        spec.name: torch.arange(start, start + spec.elements).view(spec.shape)
        for spec, start in zip(specs, starts, strict=False)
    }
    spans = dict(zip(sources, pairwise(starts), strict=True))
    notes = _trace_load(model, targets, sources, lineage_choices=(False,))
    opaque = dict(notes.opaque)
    pieces: dict[str, list[Piece]] = {}
    for copied in notes.copies:
        if copied.source.dtype is not torch.int64:
            reason = f"its value changes on the way in ({copied.source.dtype})"
            opaque |= dict.fromkeys(copied.names, reason)
            continue
        offsets = _element_offsets(copied.destination)
        arrived = copied.source.expand(copied.destination.shape).reshape(-1)
        for name in copied.names:
            piece = _table_piece(copied.target, arrived, offsets, spans[name])
            if piece is None:
                opaque[name] = "elements are repeated or lost on the way in"
            else:
                pieces.setdefault(name, []).append(piece)
    return pieces, opaque


def _table_piece(
    target: int, arrived: torch.Tensor, offsets: torch.Tensor, span: tuple[int, int]
) -> TablePiece | None:
    own = (arrived >= span[0]) & (arrived < span[1])
    source, order = (arrived[own] - span[0]).sort()
    if not source.numel() or bool((source[1:] == source[:-1]).any()):
        return None
    return TablePiece(target=target, source=source, offsets=offsets[own][order])


def _element_offsets(view: torch.Tensor) -> torch.Tensor:
    """int64 [numel], the storage offset of each element of a view, in row-major order."""
    offsets = torch.tensor(int(view.storage_offset()))
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.reshape(-1)
