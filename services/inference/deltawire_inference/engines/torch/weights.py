"""The live weights: what version they are, what enters them, and the proof that they are right.

Staging reads them on any thread; only `enter` writes, on the engine's thread, all or nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deltawire.codec.apply import LiveTensors, reverse, scatter
from deltawire.codec.digest import Digest, digest_full
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.codec.warm import warm
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
    against: object
    """Stands for the weights as they were when it was staged."""


class LiveWeights:
    """A model's tensors under the names of the run's layout."""

    def __init__(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], layout: Layout, *, run_id: str
    ) -> None:
        self._layout, self._run_id = layout, run_id
        self._tensors = LiveTensors(named_tensors, layout)
        self._state = object()
        self.digest = Digest()

    def load(self, objects: Objects) -> None:
        """Fill the tensors by a route from an anchor. Nothing is served from them meanwhile."""
        self.digest = replay(objects, self._tensors, run_id=self._run_id)
        warm()  # the first update should find its loops compiled

    def stage(self, objects: Objects) -> StagedUpdate:
        """Decode and verify a route against the live weights; they are only read."""
        state = self._state
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
            token=_Ready(patches=patches, digest=digest, against=state),
        )

    def enter(self, staged: StagedUpdate) -> None:
        """Write a staged update: O(changes). On any error the old weights are back."""
        ready = staged.token
        if not isinstance(ready, _Ready) or ready.against is not self._state:
            raise EngineError(
                f"version {PolicyVersion(staged.version)} was staged against other weights; "
                "stage it again"
            )
        try:
            scatter(self._tensors, ready.patches)
        except BaseException:
            scatter(self._tensors, reverse(ready.patches))
            raise
        self._state = object()
        self.digest = ready.digest

    def recomputed(self) -> Digest:
        """The digest over every live element: one pass over the weights."""
        return digest_full(self._tensors.named_bits(), self._layout)
