"""vLLM's weight transfer seam: the backend `deltawire`.

Opening and closing an update session change nothing, so a session that fails leaves the old weights
serving. `update_weights` takes one of

    {"key": K}                              scatter what the replica's service staged under K
    {"repo_id": R, "filename": F}           fetch, verify and decode F, then scatter: everything
                                            waits meanwhile, so rather send first
    {"repo_id": R, "filename": F, "stage": true}   the same work in a thread; returns at once

Keys we do not know are ignored, as trainers send their own. The store is the one named by
`DELTAWIRE_STORE` and no other: a request can never make the server reach another place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from deltawire.protocol.errors import MalformedObject
from deltawire_inference.vllm_plugin.bucket import Bucket
from deltawire_inference.vllm_plugin.receiver import Receiver

logger = init_logger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """POST /init_weight_transfer_engine."""

    model_dir: str = ""
    """Folder of the checkpoint this server loaded; by default the model it was started with."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """POST /update_weights."""

    key: str = ""
    repo_id: str = ""
    filename: str = ""
    stage: bool = False
    version: int | None = None
    sha256: str | None = None


class DeltawireEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Created by each vLLM worker right after it has loaded its model."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver = Receiver(self.model)
        self._bucket: Bucket | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Learn where every checkpoint element stands, and prove it. Before any update."""
        self.learn(Path(init_info.model_dir or self.model_config.model))

    def learn(self, model_dir: Path) -> None:
        """Learn the map unless this worker has one."""
        if self.receiver.fingerprint:
            return
        audit = self.receiver.learn(model_dir)
        where = self.receiver.map
        logger.info(
            "deltawire map learned: %d tensors, %d opaque %s, %d on other ranks, unwritten %s",
            len(where.pieces),
            len(where.opaque),
            sorted(where.opaque)[:3],
            len(where.ignored),
            list(audit.unwritten[:3]),
        )

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Keep the fields we know."""
        known = {field.name for field in fields(UpdateInfo)}
        return UpdateInfo(**{key: value for key, value in update_dict.items() if key in known})

    def start_weight_update(self) -> None:
        """Nothing: no weight leaves its place."""

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` was the whole update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, but without waiting for an accelerator that a CPU worker lacks."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Scatter one staged patch, or stage one from the bucket.

        Raises:
            DeltawireError: Refused before any weight was touched.
        """
        if update_info.key:
            self.receiver.apply(update_info.key)
            self.receiver.discard(update_info.key)
            return
        if not update_info.filename:
            raise MalformedObject("update_info: expected key, or repo_id and filename")
        self.learn(Path(self.model_config.model))
        if self._bucket is None:
            self._bucket = Bucket.from_environment(self.receiver)
        if update_info.stage:
            self._bucket.start_stage(update_info.repo_id, update_info.filename)
        else:
            self._bucket.apply(update_info.repo_id, update_info.filename)

    def shutdown(self) -> None:
        """Nothing is held open."""
