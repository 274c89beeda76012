"""The live weights of a vLLM child, seen from the staging thread: no copy of the model here.

Old values are asked for once per staging, at all places a route touches (`prefetch`); the workers
gather them beside their loop. Ranks that hold only a part each answer for theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from deltawire.codec.bits import BitArray, IndexArray, bits_of, tensor_of
from deltawire.codec.patch import Layout
from deltawire.protocol.errors import LayoutMismatch
from deltawire_inference.engines.vllm.client import WorkerCalls
from deltawire_inference.vllm_plugin.checkpoint_map import CheckpointMap
from deltawire_inference.vllm_plugin.live import share_of_rank
from deltawire_inference.vllm_plugin.staged import PatchPlan, load_values, plan_patch, save_values

_READ_BYTES = 64 * 2**20
"""How much of the model one read job writes out at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """One rank's map and its fingerprint, computed once."""

    where: CheckpointMap
    fingerprint: str

    @classmethod
    def load(cls, path: Path) -> RankMap:
        """Read the file a worker wrote."""
        where = CheckpointMap.load(path)
        return cls(where=where, fingerprint=where.fingerprint())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """The places a route touches, where they stand on each rank, and what they hold now."""

    key: str
    indices: Mapping[str, IndexArray]
    old: Mapping[str, torch.Tensor]
    """Per tensor [m], in the published dtype."""
    plans: Sequence[PatchPlan]


class RemoteWeights:
    """An OldValues over RPC, for one staging."""

    def __init__(self, calls: WorkerCalls, maps: Sequence[RankMap], layout: Layout) -> None:
        self._calls, self._maps, self._layout = calls, maps, layout
        self._prefetched: Prefetched | None = None
        self._whole: dict[str, BitArray] = {}

    def prefetch(self, key: str, indices: Mapping[str, IndexArray]) -> Prefetched:
        """Have every rank check and hold a plan for these places, and collect the old values.

        Raises:
            UnmappableName: A tensor cannot be patched; nothing was held.
            LayoutMismatch: No rank holds some element.
        """
        changes = [(name, torch.from_numpy(at.astype(np.int64))) for name, at in indices.items()]
        plans = [plan_patch(m.where, m.fingerprint, changes) for m in self._maps]
        folder = self._calls.folder
        pattern, old_pattern = f"{folder}/{key}-plan-{{rank}}", f"{folder}/{key}-old-{{rank}}"
        for plan, path in zip(plans, self._calls.paths(pattern), strict=True):
            plan.save(path)
        self._calls.run_job("deltawire_start_gather", key, pattern, old_pattern)
        old = {n: torch.zeros(at.size, dtype=self._dtype(n)) for n, at in indices.items()}
        held = {n: torch.zeros(at.size, dtype=torch.bool) for n, at in indices.items()}
        paths = zip(plans, self._calls.paths(pattern), self._calls.paths(old_pattern), strict=True)
        for plan, path, old_path in paths:
            plan.collect(load_values(old_path, plan), old)
            plan.held(held)
            path.unlink()
            old_path.unlink()
        _require_all(held)
        self._prefetched = Prefetched(key=key, indices=indices, old=old, plans=plans)
        return self._prefetched

    def stage(self, values: Mapping[str, torch.Tensor]) -> None:
        """Hand every rank the new values [m] for the prefetched places."""
        assert self._prefetched is not None
        key = self._prefetched.key
        pattern = f"{self._calls.folder}/{key}-values-{{rank}}"
        for plan, path in zip(self._prefetched.plans, self._calls.paths(pattern), strict=True):
            save_values(plan.arrange(values), path)
        self._calls.run_job("deltawire_start_stage", key, pattern)
        for path in self._calls.paths(pattern):
            path.unlink()

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        """See OldValues. The places must be among the prefetched ones."""
        assert self._prefetched is not None
        known, old = self._prefetched.indices[name], bits_of(self._prefetched.old[name])
        if known.size == indices.size and np.array_equal(known, indices):
            return old.copy()
        at = np.searchsorted(known, indices)
        return old[at]

    def read(self, name: str, begin: int, end: int) -> BitArray:
        """See OldValues. The whole tensor is fetched once."""
        if name not in self._whole:
            self._whole.update(self._read([name]))
        return self._whole[name][begin:end]

    def named_bits(self) -> Iterator[tuple[str, BitArray]]:
        """Every tensor's bits in layout order, for a full digest; some megabytes at a time."""
        batch: list[str] = []
        size = 0
        for name in self._layout:
            if batch and size + self._layout[name].nbytes > _READ_BYTES:
                yield from self._read(batch).items()
                batch, size = [], 0
            batch.append(name)
            size += self._layout[name].nbytes
        yield from self._read(batch).items()

    def _read(self, names: Sequence[str]) -> dict[str, BitArray]:
        pattern = f"{self._calls.folder}/read-{{rank}}"
        self._calls.run_job("deltawire_start_read", list(names), pattern)
        merged: dict[str, torch.Tensor] = {}
        for rank, path in zip(self._maps, self._calls.paths(pattern), strict=True):
            for key, part in load_file(str(path)).items():
                name = key.removesuffix(".values")
                if name not in merged:
                    merged[name] = part.clone()
                else:
                    share_of_rank(rank.where, name, part, merged[name])
            path.unlink()
        return {name: bits_of(merged[name]) for name in names}

    def _dtype(self, name: str) -> torch.dtype:
        empty = np.empty(0, self._layout[name].bits)
        return tensor_of(empty, self._layout[name].dtype).dtype


def _require_all(held: Mapping[str, torch.Tensor]) -> None:
    for name, mask in held.items():
        if not bool(mask.all()):
            raise LayoutMismatch(
                f"{name}: {int((~mask).sum())} of {mask.numel()} changed elements reach no rank"
            )
