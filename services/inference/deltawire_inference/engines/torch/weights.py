"""The live weights: what version they are, what enters them, and the proof that they are right.

Staging reads them on any thread; only `enter` writes, on the engine's thread, all or nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deltawire.codec.apply import LiveTensors, reverse, scatter
from deltawire.codec.digest import Digest, digest_full
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.errors import EngineError
from deltawire.protocol.versions import PolicyVersion
from deltawire.sync.replay import replay
from deltawire_inference.engines.base import StagedUpdate
from deltawire_inference.engines.route import Objects, read_route


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """What `stage` leaves for `enter`."""

    patches: list[SparsePatch]
    digest: Digest
    generation: int
    """Of the weights it was staged against."""


class LiveWeights:
    """A model's tensors under the names of the run's layout."""

    def __init__(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], layout: Layout, *, run_id: str
    ) -> None:
        self._layout, self._run_id = layout, run_id
        self._tensors = LiveTensors(named_tensors, layout)
        self._generation = 0
        self.digest = Digest()

    def load(self, objects: Objects) -> None:
        """Fill the tensors by a route from an anchor. Nothing is served from them meanwhile."""
        self.digest = replay(objects, self._tensors, run_id=self._run_id)
        self._warm_up()

    def stage(self, objects: Objects) -> StagedUpdate:
        """Decode and verify a route against the live weights; they are only read."""
        generation = self._generation
        patches, digest = read_route(
            objects,
            run_id=self._run_id,
            layout=self._layout,
            live=self._tensors,
            held=self.digest,
        )
        last = objects[-1][0]
        return StagedUpdate(
            version=last.version,
            base_version=objects[0][0].base_version,
            new_digest=str(digest),
            changed=sum(patch.changed for patch in patches),
            total=self._layout.total_elements,
            token=_Ready(patches=patches, digest=digest, generation=generation),
        )

    def enter(self, staged: StagedUpdate) -> None:
        """Write a staged update: O(changes). On any error the old weights are back."""
        ready = staged.token
        if not isinstance(ready, _Ready) or ready.generation != self._generation:
            raise EngineError(
                f"version {PolicyVersion(staged.version)} was staged against other weights; "
                "stage it again"
            )
        try:
            scatter(self._tensors, ready.patches)
        except BaseException:
            scatter(self._tensors, reverse(ready.patches))
            raise
        self._generation += 1
        self.digest = ready.digest

    def recomputed(self) -> Digest:
        """The digest over every live element: one pass over the weights."""
        return digest_full(self._tensors.named_bits(), self._layout)

    def _warm_up(self) -> None:
        """Compile the kernels of the pause now: one element of each dtype, written as it is."""
        for name in {tensor.dtype: name for name, tensor in self._layout.items()}.values():
            bits = self._tensors.read(name, 0, 1).copy()
            here = torch.zeros(len(bits), dtype=torch.int64).numpy()
            indices = here.astype(self._layout[name].index_type)
            self._tensors.gather(name, indices)
            scatter(self._tensors, [SparsePatch(name=name, indices=indices, values=bits)])
