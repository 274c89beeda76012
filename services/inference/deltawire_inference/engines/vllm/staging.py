"""From a fetched route to something every worker holds ready: all of an update but the swap.

    deltas   decode once for the places -> old values from the workers -> decode, digests checked
             -> new values to the workers, which check and hold them
    anchor   merged with the deltas after it into a local checkpoint, digest checked
             -> each worker compares it with what is live and holds the difference, or the file

Runs in a thread of low priority. Nothing live is touched; a failure leaves nothing but a discarded
patch behind.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from deltawire.codec.bits import BitArray, IndexArray, bits_of, tensor_of
from deltawire.codec.decode import decode_delta
from deltawire.codec.digest import Digest, digest_full
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.protocol.chain import RunManifest
from deltawire.protocol.errors import EngineError
from deltawire.protocol.layout import ObjectKind
from deltawire_inference.engines.base import StagedUpdate
from deltawire_inference.engines.route import Objects, read_route
from deltawire_inference.engines.vllm.checkpoint import write_checkpoint
from deltawire_inference.engines.vllm.client import WorkerCalls
from deltawire_inference.engines.vllm.remote_weights import RankMap, RemoteWeights
from deltawire_inference.vllm_plugin.jobs import yield_to_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPatch:
    """What the workers hold ready, and for which live weights it was made."""

    key: str
    base_digest: str
    checkpoint: Path | None = None
    """The merged checkpoint, for as long as a worker may read it."""


class Stager:
    """Stages one route at a time against one child's live weights."""

    def __init__(
        self,
        calls: WorkerCalls,
        maps: Sequence[RankMap],
        *,
        manifest: RunManifest,
        model_dir: Path,
        disk: Path,
    ) -> None:
        self._calls, self._maps = calls, maps
        self._manifest, self._layout = manifest, Layout(manifest.tensors)
        self._model_dir, self._disk = model_dir, disk

    def stage(self, objects: Objects, *, held: Digest) -> StagedUpdate:
        """Have every worker hold what leads from the live weights, digest `held`, to the end.

        Raises:
            WeightsError, EngineError: Refused; the live weights are as they were.
        """
        yield_to_sampling()
        key = uuid.uuid4().hex[:12]
        try:
            if objects[0][0].kind is ObjectKind.ANCHOR:
                return self._stage_anchor(key, objects, held)
            return self._stage_deltas(key, objects, held)
        except (OSError, SafetensorError) as error:
            self._discard(key)
            raise EngineError(f"cannot stage, is {self._calls.folder} full? {error}") from error
        except BaseException:
            self._discard(key)
            raise

    def let_go(self, patch: StagedPatch) -> None:
        """Forget an update that did not enter; it would be staged again under another key."""
        self._discard(patch.key)
        if patch.checkpoint is not None:
            shutil.rmtree(patch.checkpoint, ignore_errors=True)

    def recomputed(self) -> Digest:
        """The digest over all live weights, read through the map."""
        weights = RemoteWeights(self._calls, self._maps, self._layout)
        return digest_full(weights.named_bits(), self._layout)

    def _stage_deltas(self, key: str, objects: Objects, held: Digest) -> StagedUpdate:
        weights = RemoteWeights(self._calls, self._maps, self._layout)
        prefetched = weights.prefetch(key, touched_places(objects, self._layout, weights))
        patches, digest = read_route(
            objects,
            run_id=self._manifest.run_id,
            layout=self._layout,
            live=weights,
            held=held,
        )
        weights.stage(self._new_values(prefetched.indices, prefetched.old, patches))
        first, last = objects[0][0], objects[-1][0]
        return StagedUpdate(
            version=last.version,
            base_version=first.base_version,
            new_digest=str(digest),
            changed=sum(patch.changed for patch in patches),
            total=self._layout.total_elements,
            token=StagedPatch(key=key, base_digest=str(held)),
        )

    def _stage_anchor(self, key: str, objects: Objects, held: Digest) -> StagedUpdate:
        target = self._disk / f"merged-{key}"
        digest = write_checkpoint(self._model_dir, objects, manifest=self._manifest, target=target)
        try:
            self._calls.run_job("deltawire_start_stage_checkpoint", key, str(target))
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        total = self._layout.total_elements
        return StagedUpdate(
            version=objects[-1][0].version,
            base_version=None,
            new_digest=str(digest),
            changed=total,
            total=total,
            token=StagedPatch(key=key, base_digest=str(held), checkpoint=target),
        )

    def _new_values(
        self,
        indices: Mapping[str, IndexArray],
        old: Mapping[str, torch.Tensor],
        patches: Sequence[SparsePatch],
    ) -> dict[str, torch.Tensor]:
        """Values for all prefetched places: the new ones, or the old where nothing moved."""
        values = {name: bits_of(held).copy() for name, held in old.items()}
        for patch in patches:
            at = np.searchsorted(indices[patch.name], patch.indices)
            values[patch.name][at] = patch.values
        return {name: tensor_of(bits, self._layout[name].dtype) for name, bits in values.items()}

    def _discard(self, key: str) -> None:
        with suppress(EngineError):  # a dead child holds nothing
            self._calls.call("deltawire_discard", key)
        for path in self._calls.folder.glob(f"{key}-*"):
            path.unlink(missing_ok=True)


class _Places:
    """An OldValues that notes where it is asked, and answers 0 there.

    Positions never depend on the values at them, but for one encoding on the whole base (`read`).
    """

    def __init__(self, layout: Layout, weights: OldValues) -> None:
        self._layout, self._weights = layout, weights
        self.indices: dict[str, IndexArray] = {}

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        known = self.indices.get(name)
        self.indices[name] = indices if known is None else np.union1d(known, indices)
        return np.zeros(indices.size, self._layout[name].bits)

    def read(self, name: str, begin: int, end: int) -> BitArray:
        return self._weights.read(name, begin, end)


def touched_places(objects: Objects, layout: Layout, weights: OldValues) -> dict[str, IndexArray]:
    """Every place that some delta of a route touches, per tensor, rising."""
    places = _Places(layout, weights)
    for _, path in objects:
        decode_delta(path, layout=layout, old=places)
    return places.indices
