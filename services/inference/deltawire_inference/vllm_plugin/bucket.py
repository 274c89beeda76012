"""Updates straight from the bucket, for a plain `vllm serve` with nothing of ours in front.

Configured by the environment of the server, never by a request:

    DELTAWIRE_STORE   file:///…, hf://buckets/owner/name or s3://bucket/prefix
    DELTAWIRE_RUN     run id below it; empty is the flat layout
    DELTAWIRE_CACHE   folder for fetched objects

A request names an object that `latest.json` names too; what is fetched is the route from the
weights that are live to that version, each file checked against its sha256 and its digests. For a
model that lies whole on one rank; with tensor parallelism run the inference service.
"""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from deltawire.codec.digest import Digest, digest_full
from deltawire.protocol.chain import Head, Link
from deltawire.protocol.control import WeightNotice
from deltawire.protocol.errors import InvalidKey, ObjectMissing, SettingsError
from deltawire.protocol.layout import in_run
from deltawire.store.open import open_store
from deltawire.sync.follower import Follower
from deltawire_inference.engines.route import read_route
from deltawire_inference.vllm_plugin.mapped_weights import MappedWeights
from deltawire_inference.vllm_plugin.receiver import Receiver

STORE_VARIABLE = "DELTAWIRE_STORE"
RUN_VARIABLE = "DELTAWIRE_RUN"
CACHE_VARIABLE = "DELTAWIRE_CACHE"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    filename: str
    version: int
    digest: Digest


class Bucket:
    """Follows one run for one worker. One update at a time, as vLLM's sessions are."""

    def __init__(self, receiver: Receiver, follower: Follower) -> None:
        self._receiver, self._follower = receiver, follower
        self._weights = MappedWeights(receiver, follower.layout())
        self._digest: Digest | None = None
        self._version: int | None = None
        self._staged: _Staged | None = None
        self._thread: threading.Thread | None = None
        self._failures: dict[str, BaseException] = {}

    @classmethod
    def from_environment(cls, receiver: Receiver) -> Self:
        """Open the configured store.

        Raises:
            SettingsError: None is configured.
        """
        uri = os.environ.get(STORE_VARIABLE)
        if not uri:
            raise SettingsError(
                f"set {STORE_VARIABLE} where vLLM runs, to the bucket that updates come from; "
                "a request cannot choose it"
            )
        cache = os.environ.get(CACHE_VARIABLE) or tempfile.mkdtemp(prefix="deltawire-")
        run_id = os.environ.get(RUN_VARIABLE, "")
        return cls(receiver, Follower(open_store(uri), run_id, Path(cache)))

    def start_stage(self, repo_id: str, filename: str) -> None:
        """Stage in a thread; the next `apply` of the same object waits for it.

        Raises:
            InvalidKey: Another store or run, or no object of the chain.
        """
        self._require_ours(repo_id, filename)
        self._wait()
        self._thread = threading.Thread(target=self._try_stage, args=[filename], daemon=True)
        self._thread.start()

    def apply(self, repo_id: str, filename: str) -> None:
        """Scatter what was staged, or stage now.

        Raises:
            DeltawireError: Refused; no weight was touched.
        """
        self._require_ours(repo_id, filename)
        self._wait()
        if (failure := self._failures.pop(filename, None)) is not None:
            raise failure
        if self._staged is None or self._staged.filename != filename:
            self._staged = self._stage(filename)
        staged, self._staged = self._staged, None
        self._receiver.apply(filename)
        self._receiver.discard(filename)
        self._digest, self._version = staged.digest, staged.version

    def _require_ours(self, repo_id: str, filename: str) -> None:
        if not self._follower.accepts(WeightNotice(repo_id=repo_id, filename=filename)):
            raise InvalidKey(
                f"{repo_id!r}, {filename!r}: expected {self._follower.store.uri!r} and an object "
                f"of run {self._follower.run_id!r}"
            )

    def _wait(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _try_stage(self, filename: str) -> None:
        try:
            self._staged = self._stage(filename)
        except Exception as failure:  # noqa: BLE001  (a thread's border: `apply` raises it)
            self._failures = {filename: failure}

    def _stage(self, filename: str) -> _Staged:
        head = self._follower.head()
        link = self._link(head, filename)
        held = self._held(head)
        layout = self._follower.layout()
        patches, digest = read_route(
            self._follower.fetch(self._follower.route(self._version, link.version)),
            run_id=self._follower.run_id,
            layout=layout,
            live=self._weights,
            held=held,
        )
        self._receiver.stage_changes(filename, self._weights.changes(patches))
        return _Staged(filename=filename, version=link.version, digest=digest)

    def _link(self, head: Head, filename: str) -> Link:
        for link in head.links:
            if in_run(self._follower.run_id, link.key) == filename:
                return link
        raise ObjectMissing(f"{filename}: latest.json names no such object; it may be collected")

    def _held(self, head: Head) -> Digest:
        """Digest of the live weights; the first time, which version they are is found by it."""
        if self._digest is None:
            self._digest = digest_full(self._weights.named_bits(), self._follower.layout())
            self._version = next(
                (x.version for x in head.links if x.new_digest == str(self._digest)), None
            )
        return self._digest
