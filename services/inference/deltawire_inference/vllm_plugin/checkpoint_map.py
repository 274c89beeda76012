"""Checkpoint coordinates -> places in one rank's runtime tensors, as plain data.

A map is learned inside the vLLM worker (`trace.learn_map`) and saved as a safetensors file, so that
the replica's service, in another process, can do all index arithmetic beside the engine. It holds
no weights: a few integers per checkpoint tensor, and a table only where a loader or a backend
shuffles.

Three kinds of names have no place: `ignored` ones reach no tensor of this rank (another rank's
expert, a tied head's second copy), `opaque` ones change value on the way in (a quantised layer,
`-exp(A_log)`), and unknown ones. A delta that touches an opaque name is refused before any write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deltawire.protocol.errors import EngineError
from deltawire_inference.vllm_plugin.pieces import AffinePiece, Piece, TablePiece

MAP_FORMAT = "deltawire.checkpoint_map.1"


class UnmappableName(EngineError):
    """A delta touches a tensor that cannot be patched in place; nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a checkpoint header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One runtime tensor, seen as its whole flat storage."""

    name: str
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """A permutation that a backend applies to every block of a tensor after loading."""

    order: torch.Tensor
    """int32 [block]: the element loaded at i of a block stands at order[i] of that block."""

    def place(self, offsets: torch.Tensor) -> torch.Tensor:
        """Offsets as loaded (int64 [k]) -> offsets as they stand."""
        block = self.order.numel()
        start = torch.div(offsets, block, rounding_mode="floor") * block
        return start + self.order[offsets - start].long()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Some elements of one checkpoint tensor in one runtime tensor."""

    target: int
    offsets: torch.Tensor
    """int64 [k], element offsets into the target's storage."""
    kept: torch.Tensor | None
    """bool [m], which of the indices asked for these are; None for all."""

    def pick(self, values: torch.Tensor) -> torch.Tensor:
        """The values [m] of the indices asked for -> those that are placed here [k]."""
        return values if self.kept is None else values[self.kept]


@dataclass(slots=True, kw_only=True)
class CheckpointMap:
    """The learned map of one rank. Read-only once it has been proved."""

    targets: tuple[Target, ...]
    specs: dict[str, TensorSpec]
    pieces: dict[str, tuple[Piece, ...]]
    """Only names that reach this rank."""
    opaque: dict[str, str] = field(default_factory=dict)
    """name -> why it cannot be patched in place."""
    relayouts: dict[int, Relayout] = field(default_factory=dict)
    """By target index."""

    @property
    def ignored(self) -> frozenset[str]:
        """Names that reach no tensor of this rank."""
        return frozenset(self.specs) - frozenset(self.pieces) - frozenset(self.opaque)

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Make names opaque that were mapped."""
        for name in names:
            self.pieces.pop(name, None)
            self.opaque[name] = reason

    def require_mapped(self, names: Iterable[str]) -> None:
        """Refuse unknown and opaque names.

        Raises:
            UnmappableName: naming the first bad tensor, the reason and what to do.
        """
        for name in names:
            if name not in self.specs:
                raise UnmappableName(
                    f"{name}: not a tensor of the checkpoint this server loaded; "
                    "serve the run's base model"
                )
            if name in self.opaque:
                raise UnmappableName(
                    f"{name}: cannot be patched in place ({self.opaque[name]}); "
                    "restart the server on the merged checkpoint"
                )

    def locate(self, name: str, indices: torch.Tensor) -> list[Placement]:
        """Where elements of `name` stand here.

        Args:
            name: A tensor that `require_mapped` accepts.
            indices: int64 [m], flat checkpoint indices, rising.
        """
        placements = []
        for piece in self.pieces.get(name, ()):
            offsets, kept = piece.locate(indices)
            if offsets.numel():
                relayout = self.relayouts.get(piece.target)
                placed = offsets if relayout is None else relayout.place(offsets)
                placements.append(Placement(target=piece.target, offsets=placed, kept=kept))
        return placements

    def fingerprint(self) -> str:
        """sha256 over all that decides where an element goes."""
        digest = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for key, tensor in sorted(self._tables().items()):
            digest.update(key.encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the map: geometry as JSON metadata, tables and permutations as tensors."""
        metadata = {"format": MAP_FORMAT, "map": json.dumps(self._header(), sort_keys=True)}
        save_file(self._tables() or {"none": torch.zeros(0)}, str(path), metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> CheckpointMap:
        """Read what `save` wrote.

        Raises:
            ValueError: The file is no map of this format.
        """
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != MAP_FORMAT:
                raise ValueError(f"{path}: expected {MAP_FORMAT}, found {metadata.get('format')}")
            tables = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return _from_header(json.loads(metadata["map"]), tables)

    def _header(self) -> dict[str, object]:
        order_keys = {id(order): key for key, order in self._orders().items()}
        return {
            "targets": [[t.name, dtype_name(t.dtype), t.elements] for t in self.targets],
            "specs": [[s.name, list(s.shape), dtype_name(s.dtype)] for s in self.specs.values()],
            "pieces": {
                name: [_piece_header(name, i, piece) for i, piece in enumerate(pieces)]
                for name, pieces in self.pieces.items()
            },
            "opaque": self.opaque,
            "relayouts": {str(t): order_keys[id(r.order)] for t, r in self.relayouts.items()},
        }

    def _tables(self) -> dict[str, torch.Tensor]:
        tables = self._orders()
        for name, pieces in self.pieces.items():
            for i, piece in enumerate(pieces):
                if isinstance(piece, TablePiece):
                    tables[f"source.{name}.{i}"] = piece.source
                    tables[f"offsets.{name}.{i}"] = piece.offsets
        return tables

    def _orders(self) -> dict[str, torch.Tensor]:
        """Layers of equal shape share one permutation: it is stored once."""
        orders = {id(r.order): r.order for r in self.relayouts.values()}
        return {f"order.{i}": order for i, order in enumerate(orders.values())}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """`bfloat16` -> `torch.bfloat16`.

    Raises:
        ValueError: No such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected a torch dtype name, found {name!r}")
    return dtype


def _piece_header(name: str, i: int, piece: Piece) -> list[object]:
    if isinstance(piece, TablePiece):
        return [piece.target, f"{name}.{i}"]
    return [
        piece.target,
        list(piece.sizes),
        list(piece.source_strides),
        list(piece.target_strides),
        piece.source_offset,
        piece.target_offset,
    ]


def _piece_from_header(row: list[object], tables: Mapping[str, torch.Tensor]) -> Piece:
    target, *rest = row
    assert isinstance(target, int)
    if len(rest) == 1:
        return TablePiece(
            target=target, source=tables[f"source.{rest[0]}"], offsets=tables[f"offsets.{rest[0]}"]
        )
    sizes, source_strides, target_strides, source_offset, target_offset = rest
    return AffinePiece(
        target=target,
        sizes=_ints(sizes),
        source_strides=_ints(source_strides),
        target_strides=_ints(target_strides),
        source_offset=_ints([source_offset])[0],
        target_offset=_ints([target_offset])[0],
    )


def _ints(values: object) -> tuple[int, ...]:
    assert isinstance(values, list)
    return tuple(int(v) for v in values)


def _from_header(header: dict[str, object], tables: Mapping[str, torch.Tensor]) -> CheckpointMap:
    targets, specs = header["targets"], header["specs"]
    pieces, opaque, relayouts = header["pieces"], header["opaque"], header["relayouts"]
    assert isinstance(targets, list) and isinstance(specs, list)
    assert isinstance(pieces, dict) and isinstance(opaque, dict) and isinstance(relayouts, dict)
    orders = {key: table for key, table in tables.items() if key.startswith("order.")}
    return CheckpointMap(
        targets=tuple(Target(name=n, dtype=dtype_named(d), elements=e) for n, d, e in targets),
        specs={n: TensorSpec(name=n, shape=tuple(s), dtype=dtype_named(d)) for n, s, d in specs},
        pieces={
            name: tuple(_piece_from_header(row, tables) for row in rows)
            for name, rows in pieces.items()
        },
        opaque=dict(opaque),
        relayouts={int(t): Relayout(order=orders[key]) for t, key in relayouts.items()},
    )
