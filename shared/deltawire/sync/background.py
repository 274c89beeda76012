"""What is written beside training: anchors, skip files, and the sweep after them.

One thread, one piece of work at a time, so that an anchor is never begun before the one before it
is up. Work that fails is logged and not repeated: an anchor is due again after the next version,
and a skip file is only a shortcut.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from deltawire.codec.bits import BitArray
from deltawire.codec.digest import Digest
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import Head, Link
from deltawire.protocol.errors import DeltawireError
from deltawire.protocol.layout import ObjectKind, in_run, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.cadence import Cadence, anchor_due
from deltawire.sync.ledger import Ledger
from deltawire.sync.options import PublishOptions
from deltawire.sync.retention import GRACE_S, plan_links, plan_sweep
from deltawire.sync.scratch import scratch_folder
from deltawire.sync.skips import RecentDeltas, upload_skip
from deltawire.sync.upload import upload_anchor

log = logging.getLogger(__name__)


class Background:
    """Owns the thread and the scratch folder. Not thread-safe: the publisher calls it in turn."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        layout: Layout,
        *,
        work: Path,
        options: PublishOptions,
    ) -> None:
        self._store, self._ledger, self._layout, self._work = store, ledger, layout, work
        self._options = options
        self._cadence = Cadence(every=options.anchor_every)
        self._recent = RecentDeltas(options.skip_levels)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltawire-anchors")
        self._anchor: Future[None] | None = None
        self._last: Future[None] | None = None
        self._anchor_version = ledger.head.version

    @property
    def anchor_due(self) -> bool:
        """Whether the newest version should get an anchor now."""
        if self._anchor is not None and not self._anchor.done():
            return False
        head = self._ledger.head
        return anchor_due(head.links, version=head.version, cadence=self._cadence)

    def start_anchor(self, bits: Mapping[str, BitArray], digest: Digest) -> None:
        """Write an anchor of the newest version, whose bits these are and stay."""
        version = self._ledger.head.version
        self._anchor_version = version
        self._anchor = self._start("anchor", partial(self._anchor_and_sweep, version, bits, digest))

    def add_delta(self, version: PolicyVersion, patches: list[SparsePatch]) -> None:
        """Note a committed version, and merge the skip files that end at it."""
        for deltas in self._recent.add(version, patches):
            self._start("skip", partial(self._write_skip, version, deltas))

    def write_anchor(
        self, version: PolicyVersion, bits: Mapping[str, BitArray], digest: Digest
    ) -> None:
        """Upload an anchor, link it, and unlink what no route needs any more."""
        link = self.upload_anchor(version, bits, digest)
        head = self._ledger.head
        wider = head.model_copy(update={"links": [*head.links, link]})
        plan = plan_links(wider, keep_versions=self._options.keep_versions)
        self._ledger.write(add=[link], drop=plan.drop)

    def upload_anchor(
        self, version: PolicyVersion, bits: Mapping[str, BitArray], digest: Digest
    ) -> Link:
        """An anchor in the store, not linked yet."""
        with scratch_folder(self._work) as folder:
            return self._ledger.under_free_key(
                lambda epoch: upload_anchor(
                    self._store,
                    bits,
                    layout=self._layout,
                    version=version,
                    run_id=self._ledger.head.run_id,
                    digest=digest,
                    epoch=epoch,
                    options=self._options,
                    folder=folder,
                )
            )

    def sweep(self, *, grace_s: float) -> list[str]:
        """Remove objects that no link names and that are `grace_s` old. Returns their keys."""
        head = self._ledger.head
        listing = self._store.list(in_run(head.run_id, ""))
        left = plan_sweep(
            listing, head, now_s=time.time(), grace_s=grace_s, arriving=self._arriving(head)
        )
        self._store.delete([info.key for info in left])
        return [info.key for info in left]

    def start_sweep(self) -> None:
        """Sweep beside training."""
        self._start("sweep", partial(self.sweep, grace_s=GRACE_S))

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Finish what was begun."""
        self._thread.shutdown(wait=True)

    def _start(self, kind: str, work: Callable[[], object]) -> Future[None]:
        version = self._ledger.head.version

        def border() -> None:
            """Of the thread: record and go on."""
            try:
                work()
            except DeltawireError as error:
                log.warning(
                    "%s not written", kind, extra={"version": version, "reason": str(error)}
                )

        self._last = self._thread.submit(border)
        return self._last

    def _anchor_and_sweep(
        self, version: PolicyVersion, bits: Mapping[str, BitArray], digest: Digest
    ) -> None:
        self.write_anchor(version, bits, digest)
        self.sweep(grace_s=GRACE_S)

    def _write_skip(self, version: PolicyVersion, deltas: Sequence[Sequence[SparsePatch]]) -> None:
        head = self._ledger.head
        base_digest, new_digest = head.link_digest(version - len(deltas)), head.link_digest(version)
        if base_digest is None or new_digest is None:
            return
        with scratch_folder(self._work) as folder:
            link = self._ledger.under_free_key(
                lambda epoch: upload_skip(
                    self._store,
                    deltas,
                    layout=self._layout,
                    run_id=head.run_id,
                    version=version,
                    base_digest=base_digest,
                    new_digest=new_digest,
                    encoding=self._options.encoding,
                    epoch=epoch,
                    folder=folder,
                )
            )
        self._ledger.write(add=[link])

    def _arriving(self, head: Head) -> set[str]:
        """Keys that this process may be uploading now."""
        epoch = self._ledger.claim.epoch
        ahead = {
            object_key(kind, head.version + 1, epoch=epoch)
            for kind in (ObjectKind.DELTA, ObjectKind.ANCHOR, ObjectKind.ADAPTER)
        }
        return ahead | {object_key(ObjectKind.ANCHOR, self._anchor_version, epoch=epoch)}
