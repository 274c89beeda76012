"""A patch in runtime coordinates: made beside the engine, checked, then only scattered.

The replica's service plans a patch from a rank's map (`plan_patch`), asks the worker for the old
values at its places, decodes, and hands over the new values. Plan and values travel as safetensors
files on local memory (`/dev/shm`), so that the engine's own loop neither fetches nor decodes nor
locates.

    plan    `{target}.offsets`  int32 (int64 beyond 2^31), element offsets into the target's storage
    values  `{target}.values`   the checkpoint's dtype, one per offset; old and new alike

Values are absolute: scattering twice is scattering once, and the old values undo a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from deltawire.protocol.errors import MalformedObject
from deltawire_inference.vllm_plugin.checkpoint_map import CheckpointMap, dtype_name, dtype_named

_INT32_ELEMENTS = 2**31
_OFFSETS, _VALUES = ".offsets", ".values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some of one checkpoint tensor's changes in one segment."""

    name: str
    start: int
    end: int
    kept: torch.Tensor | None
    """bool [m], which of the tensor's m changes these are; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """All places that a patch touches in one runtime tensor, for values of one dtype."""

    target: int
    dtype: torch.dtype
    """Of the checkpoint's values; the target may be wider."""
    offsets: torch.Tensor
    """int32 or int64 [k]."""
    slices: tuple[Slice, ...] = ()
    """Whose changes they are, in order; empty once the plan has been saved and read back."""

    @property
    def key(self) -> str:
        """What the segment's tensors are called in a file."""
        return f"{self.target}.{dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPlan:
    """Where a patch goes on one rank."""

    segments: tuple[Segment, ...]
    fingerprint: str
    """Of the map it was made with; a worker with another map refuses it."""
    changed: dict[str, int] = field(default_factory=dict)
    """Checkpoint tensor -> number of its changes (all of them, on this rank or not)."""

    def arrange(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values by checkpoint tensor [m] -> values by segment key [k]."""
        return {
            segment.key: torch.cat(
                [
                    values[part.name] if part.kept is None else values[part.name][part.kept]
                    for part in segment.slices
                ]
            )
            for segment in self.segments
        }

    def collect(
        self, arranged: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]
    ) -> None:
        """Values by segment key -> written into values by checkpoint tensor [m], if held here."""
        for segment in self.segments:
            held = arranged[segment.key]
            for part in segment.slices:
                if part.kept is None:
                    into[part.name].copy_(held[part.start : part.end])
                else:
                    into[part.name][part.kept] = held[part.start : part.end]

    def held(self, into: Mapping[str, torch.Tensor]) -> None:
        """Mark in bool masks [m] by checkpoint tensor which changes have a place on this rank."""
        for segment in self.segments:
            for part in segment.slices:
                into[part.name][slice(None) if part.kept is None else part.kept] = True

    def save(self, path: Path) -> None:
        """Write the offsets; the slices stay with the planner."""
        tensors = {segment.key + _OFFSETS: segment.offsets for segment in self.segments}
        _save(tensors, path, fingerprint=self.fingerprint)

    @classmethod
    def load(cls, path: Path) -> PatchPlan:
        """Read what `save` wrote.

        Raises:
            MalformedObject: Not a plan.
        """
        tensors, fingerprint = _load(path, _OFFSETS)
        segments = []
        for key, offsets in tensors.items():
            target, _, dtype = key.partition(".")
            segments.append(Segment(target=int(target), dtype=dtype_named(dtype), offsets=offsets))
        return cls(segments=tuple(segments), fingerprint=fingerprint)

    def require_fits(self, where: CheckpointMap, fingerprint: str) -> None:
        """Check that the plan was made for this map and stays inside its targets.

        Raises:
            MalformedObject: It was not, or it does not.
        """
        if self.fingerprint != fingerprint:
            raise MalformedObject(
                f"plan of map {self.fingerprint[:12]}, this rank has {fingerprint[:12]}; plan again"
            )
        for segment in self.segments:
            elements = where.targets[segment.target].elements
            if not segment.offsets.numel():
                continue
            low, high = (int(bound) for bound in segment.offsets.aminmax())
            if low < 0 or high >= elements:
                raise MalformedObject(
                    f"{where.targets[segment.target].name}: an offset lies outside its "
                    f"{elements} elements"
                )


def plan_patch(
    where: CheckpointMap, fingerprint: str, changes: Iterable[tuple[str, torch.Tensor]]
) -> PatchPlan:
    """Place a delta on one rank.

    Args:
        where: The rank's map.
        fingerprint: `where.fingerprint()`, computed once by the caller.
        changes: (name, int64 flat indices [m], rising and unique) per changed checkpoint tensor.

    Raises:
        UnmappableName: A name is unknown or opaque.
        MalformedObject: Indices repeat, fall or lie outside, or a name comes twice.
    """
    parts: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, str, torch.Tensor | None]]] = {}
    changed: dict[str, int] = {}
    for name, indices in changes:
        where.require_mapped([name])
        spec = where.specs[name]
        if name in changed:
            raise MalformedObject(f"{name}: comes twice in one delta")
        changed[name] = indices.numel()
        _require_rising(name, indices, spec.elements)
        for placed in where.locate(name, indices):
            parts.setdefault((placed.target, spec.dtype), []).append(
                (placed.offsets, name, placed.kept)
            )
    segments = tuple(
        _segment(where, target, dtype, placed) for (target, dtype), placed in parts.items()
    )
    return PatchPlan(segments=segments, fingerprint=fingerprint, changed=changed)


def save_values(values: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write values by segment key, whole or not at all."""
    _save({key + _VALUES: value for key, value in values.items()}, path)


def load_values(path: Path, plan: PatchPlan) -> dict[str, torch.Tensor]:
    """Read values for a plan, by segment key.

    Raises:
        MalformedObject: A segment is missing, or has another dtype or length.
    """
    values, _ = _load(path, _VALUES)
    for segment in plan.segments:
        found = values.get(segment.key)
        if (
            found is None
            or found.dtype is not segment.dtype
            or found.shape != segment.offsets.shape
        ):
            raise MalformedObject(
                f"{path.name}: expected {segment.offsets.numel()} {segment.dtype} values for "
                f"segment {segment.key}, found "
                f"{'none' if found is None else (found.numel(), found.dtype)}"
            )
    return values


def _segment(
    where: CheckpointMap,
    target: int,
    dtype: torch.dtype,
    placed: list[tuple[torch.Tensor, str, torch.Tensor | None]],
) -> Segment:
    slices, start = [], 0
    for offsets, name, kept in placed:
        slices.append(Slice(name=name, start=start, end=start + offsets.numel(), kept=kept))
        start += offsets.numel()
    joined = torch.cat([offsets for offsets, _, _ in placed])
    if where.targets[target].elements < _INT32_ELEMENTS:
        joined = joined.to(torch.int32)
    return Segment(target=target, dtype=dtype, offsets=joined, slices=tuple(slices))


def _require_rising(name: str, indices: torch.Tensor, elements: int) -> None:
    if not indices.numel():
        return
    if (
        int(indices[0]) < 0
        or int(indices[-1]) >= elements
        or not bool((indices[1:] > indices[:-1]).all())
    ):
        raise MalformedObject(f"{name}: indices must rise, be unique and lie in [0, {elements})")


def _save(tensors: Mapping[str, torch.Tensor], path: Path, fingerprint: str = "") -> None:
    """Write beside and rename, so that a reader never meets half a file."""
    unfinished = path.with_name(path.name + ".tmp")
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        str(unfinished),
        metadata={"fingerprint": fingerprint},
    )
    unfinished.replace(path)


def _load(path: Path, suffix: str) -> tuple[dict[str, torch.Tensor], str]:
    try:
        with safe_open(str(path), framework="pt") as file:
            fingerprint = (file.metadata() or {}).get("fingerprint", "")
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise MalformedObject(f"{path}: not a staged patch: {error}") from error
    if foreign := [key for key in tensors if not key.endswith(suffix)]:
        raise MalformedObject(f"{path}: expected keys *{suffix}, found {foreign[0]}")
    return {key.removesuffix(suffix): tensor for key, tensor in tensors.items()}, fingerprint
