"""One worker's side of an update: learn the map, gather old values, hold a staged patch, scatter
it.

Life of a patch, named by its key:

    gather (thread)  plan file  -> offsets checked and held, old values written for the planner
    stage  (thread)  values file -> new values checked and held; every page of them touched
    apply  (engine)  addresses compared, one scatter per segment; nothing else happens in the loop
    discard          forgets it

`gather` and `stage` run in a thread beside the engine's loop; torch releases the interpreter lock
in its kernels. Everything that can be wrong with a patch is found before `apply`, and `apply`
itself only stores absolute values: done twice it is done once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from deltawire.protocol.errors import MalformedObject, ReplicaBroken
from deltawire_inference.vllm_plugin.checkpoint_files import read_specs, read_tensors
from deltawire_inference.vllm_plugin.checkpoint_map import CheckpointMap
from deltawire_inference.vllm_plugin.huge_pages import use_huge_pages
from deltawire_inference.vllm_plugin.live import LiveModel, differing, read_tensor, write_tensor
from deltawire_inference.vllm_plugin.relayout import RULES, add_relayouts
from deltawire_inference.vllm_plugin.scatter import scatter
from deltawire_inference.vllm_plugin.staged import (
    PatchPlan,
    Segment,
    load_values,
    plan_patch,
    save_values,
)
from deltawire_inference.vllm_plugin.trace import learn_map, runtime_tensors
from deltawire_inference.vllm_plugin.transfer import beside_the_engine, copy_to
from deltawire_inference.vllm_plugin.verify import Audit, absorbed_names, audit, require_equal

MAX_DIFF_SHARE = 0.1
"""Above this share of changed elements a dense copy is cheaper than a scatter, and far smaller."""


@dataclass(slots=True, kw_only=True)
class HeldPatch:
    """A patch on its way: the plan first, then its values; or a whole checkpoint instead."""

    plan: PatchPlan | None = None
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    checkpoint: Path | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a swap cost inside the worker."""

    seconds: float
    elements: int


class Receiver:
    """Patches one rank's live model. One swap at a time; threads beside it are its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._map: CheckpointMap | None = None
        self._live: LiveModel | None = None
        self._fingerprint = ""
        self._patches: dict[str, HeldPatch] = {}

    @property
    def map(self) -> CheckpointMap:
        """The learned map.

        Raises:
            ReplicaBroken: `learn` has not succeeded yet.
        """
        if self._map is None:
            raise ReplicaBroken("no checkpoint map yet; call init_weight_transfer_engine first")
        return self._map

    @property
    def live(self) -> LiveModel:
        """The live tensors that the map speaks of. Raises as `map` does."""
        if self._live is None:
            raise ReplicaBroken("no checkpoint map yet; call init_weight_transfer_engine first")
        return self._live

    @property
    def fingerprint(self) -> str:
        """Of the learned map; empty before."""
        return self._fingerprint

    def learn(self, model_dir: Path) -> Audit:
        """Learn the map from the checkpoint that the model was just loaded from, and prove it.

        Raises:
            ReplicaBroken: The proof fails; nothing can be patched.
        """
        learned = learn_map(self._model, read_specs(model_dir))
        add_relayouts(self._model, learned, RULES)
        absorbed = absorbed_names(self._model, learned)
        learned.refuse(absorbed, "latent attention keeps products of it that are not refreshed")
        require_equal(LiveModel(self._model), learned, read_tensors(model_dir))
        self.adopt(learned)
        use_huge_pages(runtime_tensors(self._model).values())
        return audit(self._model, learned)

    def adopt(self, learned: CheckpointMap) -> None:
        """Use a map that is known to hold for this model as it stands."""
        self._live = LiveModel(self._model)
        self._map, self._fingerprint = learned, learned.fingerprint()

    @torch.no_grad()
    def gather(self, key: str, plan_path: Path, old_path: Path) -> None:
        """Check and hold a plan, write the old values at its places.

        Raises:
            MalformedObject: No plan, or not one for this map.
        """
        plan = PatchPlan.load(plan_path)
        plan.require_fits(self.map, self.fingerprint)
        with beside_the_engine(self.live.device):
            old = {segment.key: self._old(segment) for segment in plan.segments}
        save_values(old, old_path)
        self._patches[key] = HeldPatch(plan=plan)

    @torch.no_grad()
    def read(self, names: Sequence[str], path: Path) -> None:
        """Write the live values of whole checkpoint tensors, 0 where they are not held here.

        Raises:
            UnmappableName: One of them has no place.
        """
        self.map.require_mapped(names)
        save_values({name: read_tensor(self.live, self.map, name) for name in names}, path)

    def stage(self, key: str, values_path: Path) -> None:
        """Check and hold the new values for a gathered plan.

        Raises:
            MalformedObject: No such plan, or values that do not fit it.
        """
        patch = self._patches.get(key)
        if patch is None or patch.plan is None:
            raise MalformedObject(f"{key}: values without a plan; gather first")
        self._hold(key, patch.plan, load_values(values_path, patch.plan))

    @torch.no_grad()
    def stage_checkpoint(self, key: str, model_dir: Path) -> None:
        """Hold what turns the live weights into a checkpoint, as a patch if that pays.

        Raises:
            UnmappableName: The checkpoint has a tensor that cannot be patched.
        """
        self.map.require_mapped(spec.name for spec in read_specs(model_dir))
        total = sum(spec.elements for spec in self.map.specs.values())
        changes, found = [], 0
        for name, indices, values in differing(self.live, self.map, read_tensors(model_dir)):
            found += indices.numel()
            if found > MAX_DIFF_SHARE * total:
                self._patches[key] = HeldPatch(checkpoint=model_dir, ready=True)
                return
            changes.append((name, indices, values))
        self.stage_changes(key, changes)

    @torch.no_grad()
    def apply(self, key: str) -> Applied:
        """Scatter a staged patch into the live weights. Called between two steps.

        Raises:
            MalformedObject: The patch is not staged; nothing was written.
            ReplicaBroken: The model moved; nothing was written.
        """
        started = time.perf_counter()
        patch = self._patches.get(key)
        if patch is None or not patch.ready:
            raise MalformedObject(f"{key}: not staged on this worker; stage it first")
        self.live.require_unmoved()
        if patch.checkpoint is not None:
            elements = self._copy_checkpoint(patch.checkpoint)
        else:
            assert patch.plan is not None
            elements = self._scatter(patch.plan, patch.values)
        return Applied(seconds=time.perf_counter() - started, elements=elements)

    def discard(self, key: str) -> None:
        """Forget a patch, applied or not."""
        self._patches.pop(key, None)

    @torch.no_grad()
    def stage_changes(
        self, key: str, changes: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
    ) -> None:
        """Hold a patch given in checkpoint coordinates: (name, int64 indices [m], values [m]).

        Raises:
            UnmappableName, MalformedObject: Refused; nothing is held.
        """
        indices: list[tuple[str, torch.Tensor]] = []
        values: dict[str, torch.Tensor] = {}
        for name, where, value in changes:
            if value.shape != where.shape:
                raise MalformedObject(f"{name}: {where.numel()} indices, {value.numel()} values")
            indices.append((name, where))
            values[name] = value
        plan = plan_patch(self.map, self.fingerprint, indices)
        self._hold(key, plan, plan.arrange(values))

    def _hold(self, key: str, plan: PatchPlan, values: dict[str, torch.Tensor]) -> None:
        """Cast and copy everything to where it will be read from, outside the engine's loop.

        A copy even where nothing needs casting: the files are mapped, and the swap must not wait
        for their pages.
        """
        segments, ready = [], {}
        with beside_the_engine(self.live.device):
            for segment in plan.segments:
                flat = self.live.flat(segment.target)
                offsets = copy_to(segment.offsets, flat.device, torch.int64)
                segments.append(replace(segment, offsets=offsets, slices=()))
                ready[segment.key] = copy_to(values[segment.key], flat.device, flat.dtype)
        held = replace(plan, segments=tuple(segments))
        self._patches[key] = HeldPatch(plan=held, values=ready, ready=True)

    def _old(self, segment: Segment) -> torch.Tensor:
        flat = self.live.flat(segment.target)
        return flat[segment.offsets.to(flat.device)].to(segment.dtype).cpu()

    def _scatter(self, plan: PatchPlan, values: dict[str, torch.Tensor]) -> int:
        for segment in plan.segments:
            scatter(self.live.flat(segment.target), segment.offsets, values[segment.key])
        return sum(segment.offsets.numel() for segment in plan.segments)

    def _copy_checkpoint(self, model_dir: Path) -> int:
        elements = 0
        for name, value in read_tensors(model_dir):
            if name in self.map.pieces:
                write_tensor(self.live, self.map, name, value)
                elements += value.numel()
        return elements
