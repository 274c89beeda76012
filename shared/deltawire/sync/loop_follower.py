"""Bring a live model to the newest published version, in place."""

import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from deltawire.codec.apply import LiveTensors
from deltawire.codec.digest import Digest, digest_full
from deltawire.protocol.chain import Head
from deltawire.protocol.errors import LayoutMismatch, WeightsError
from deltawire.protocol.versions import PolicyVersion
from deltawire.sync.follower import Follower
from deltawire.sync.model_weights import named_weights
from deltawire.sync.replay import replay


@dataclass(frozen=True, slots=True)
class _Held:
    """What we wrote into a model."""

    model: "weakref.ref[torch.nn.Module]"
    version: PolicyVersion
    digest: Digest


class ModelFollower:
    """Reads a run; writes into models, one after another. Nobody else may write into them."""

    def __init__(self, follower: Follower, *, scratch: Path | None = None) -> None:
        """`scratch` is a folder that goes when this object does."""
        self.follower = follower
        self._forget = (
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True) if scratch else None
        )
        self._held: _Held | None = None

    def newest(self) -> PolicyVersion:
        """The newest published version. ObjectMissing while there is none."""
        return self.follower.head().version

    def apply_to(self, model: torch.nn.Module) -> PolicyVersion:
        """Write the newest version into the model's tensors; returns it.

        The first call finds out by digest whether the model holds some published version already
        (the base model, a checkpoint); else it starts from an anchor. Each object is verified
        before it is written, so after an error the model stands at a published version. Raises
        LayoutMismatch when the model is not the run's (an fp32 copy of a bf16 run: load it in
        bf16), WeightsError and StoreError children.
        """
        head = self.follower.head()
        layout = self.follower.layout()
        try:
            live = LiveTensors(named_weights(model), layout)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{error}; load the model in the run's dtype") from error
        have, digest = self._known(model, live, head)
        for link in self.follower.route(have, head.version):
            objects = self.follower.fetch([link])
            try:
                digest = replay(objects, live, run_id=self.follower.run_id, digest=digest)
            except WeightsError:
                self._held = None  # look at the weights anew next time
                raise
            self._held = _Held(weakref.ref(model), link.version, digest)
        return head.version

    def close(self) -> None:
        """Let go of the temporary cache. The store is the caller's."""
        if self._forget is not None:
            self._forget()

    def _known(
        self, model: torch.nn.Module, live: LiveTensors, head: Head
    ) -> tuple[PolicyVersion | None, Digest | None]:
        if self._held is not None and self._held.model() is model:
            return self._held.version, self._held.digest
        digest = digest_full(live.named_bits(), live.layout)
        versions = [link.version for link in head.links if link.new_digest == str(digest)]
        if not versions:
            return None, None
        self._held = _Held(weakref.ref(model), max(versions), digest)
        return max(versions), digest
