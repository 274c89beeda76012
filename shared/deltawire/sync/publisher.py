"""Publish a model's weights to a run, version by version.

    publisher = Publisher.open(store, run_id="r1", named_tensors=..., base_model="...")
    pending = publisher.diff(model.named_parameters())     # training waits for this only
    published = publisher.commit(pending)                  # in a thread, beside the next step

A sync has the phases diff -> encode -> upload -> commit. Versions are strictly ordered: `diff`
waits until the version before it is committed or has failed. The shadow advances only with a
commit; when one fails, the next diff finds the same changes again: nothing is lost or doubled.

Anchors are written beside training: a snapshot of the published bits (taken while no diff runs, in
memory until the upload ends) goes up in the background, one at a time.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from deltawire.codec.bits import BitArray
from deltawire.codec.diff import Shadow
from deltawire.codec.digest import Digest
from deltawire.codec.encode import Encoding, encode_delta
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import Head, Link
from deltawire.protocol.control import SyncRecord
from deltawire.protocol.errors import DeltawireError, Fenced, StoreUnavailable
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind, in_run, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.cadence import Cadence, anchor_due
from deltawire.sync.fence import OwnerFile, new_owner
from deltawire.sync.founding import check_same_model, found_run, restored_shadow
from deltawire.sync.ledger import Ledger
from deltawire.sync.retention import GRACE_S, plan_links, plan_sweep
from deltawire.sync.upload import upload_anchor, upload_object

log = logging.getLogger(__name__)

KEEP_VERSIONS = 64
"""A replica this far behind still finds a way by deltas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingDelta:
    """A diff that is neither committed nor discarded."""

    version: PolicyVersion
    base_version: PolicyVersion
    patches: list[SparsePatch]
    changed: int
    diff_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A committed version: what a notice carries, and what it cost."""

    link: Link
    record: SyncRecord


class Publisher:
    """The one writer of a run. Its methods may be called from a training and a commit thread."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        shadow: Shadow,
        *,
        encoding: Encoding,
        cadence: Cadence,
        anchor_packed: bool,
        keep_versions: int,
        owner_file: OwnerFile | None,
    ) -> None:
        self.store = store
        self._ledger = ledger
        self._shadow = shadow
        self._digest = shadow.digest()
        self._encoding, self._cadence, self._packed = encoding, cadence, anchor_packed
        self._keep_versions = keep_versions
        self._owner_file = owner_file
        self._work = tempfile.TemporaryDirectory(prefix="deltawire-publish-")
        self._turn = threading.Condition()
        self._pending: PendingDelta | None = None
        self._unsettled: Digest | None = None
        self._anchors = ThreadPoolExecutor(1, thread_name_prefix="anchor")
        self._anchor: Future[None] | None = None
        self._anchor_version = ledger.head.version

    @classmethod
    def open(
        cls,
        store: Store,
        *,
        run_id: str,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        base_model: str = "",
        model_files: Mapping[str, Path] | None = None,
        master_dtype: str = "BF16",
        encoding: Encoding = "auto",
        anchor_every: int | None = None,
        anchor_packed: bool = True,
        keep_versions: int = KEEP_VERSIONS,
        owner_file: Path | None = None,
        take_over: bool = False,
    ) -> Self:
        """Found a run (run.json, model files, anchor 0) or go on with one.

        fp32 tensors are masters and are published as `master_dtype`. A run that exists is gone on
        with when `owner_file` is the one it was founded with, or with `take_over`; its head need
        not equal the tensors given: the next diff is taken against what was really published.
        Raises Fenced when the run is another trainer's, LayoutMismatch for another model.
        """
        held = OwnerFile(owner_file) if owner_file is not None else None
        try:
            tensors = list(named_tensors)
            layout, tied = Layout.of_tensors(tensors, master_dtype=master_dtype)
            owner = held.owner if held is not None else new_owner()
            check_same_model(store, run_id, layout)
            ledger = Ledger.open(store, run_id, owner=owner, take_over=take_over)
            shadow = Shadow.of(tensors, layout)
            files = dict(model_files or {})
            if ledger.head.links:
                shadow = restored_shadow(store, ledger.head, shadow)
            else:
                found_run(
                    store,
                    ledger,
                    shadow,
                    tied=tied,
                    base_model=base_model,
                    model_files=files,
                    anchor_packed=anchor_packed,
                )
        except BaseException:
            if held is not None:
                held.close()
            raise
        return cls(
            store,
            ledger,
            shadow,
            encoding=encoding,
            cadence=Cadence(every=anchor_every),
            anchor_packed=anchor_packed,
            keep_versions=keep_versions,
            owner_file=held,
        )

    @property
    def version(self) -> PolicyVersion:
        """The newest committed version."""
        return self._ledger.head.version

    @property
    def digest(self) -> str:
        """Digest of the newest committed version."""
        return str(self._digest)

    @property
    def head(self) -> Head:
        """latest.json as this publisher last wrote it."""
        return self._ledger.head

    @property
    def run_id(self) -> str:
        """The run."""
        return self._ledger.head.run_id

    @property
    def layout(self) -> Layout:
        """The run's tensors, in order."""
        return self._shadow.layout

    def diff(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> PendingDelta:
        """What changed since the last committed version. One pass over the weights.

        Waits while the version before is still on its way. Raises StoreUnavailable when it is
        still unknown whether that one was committed, LayoutMismatch for other tensors.
        """
        started = time.perf_counter()
        with self._turn:
            self._turn.wait_for(lambda: self._pending is None or self._unsettled is not None)
            self._settle()
            patches = self._shadow.diff(named_tensors)
            base = self._ledger.head.version
            self._pending = PendingDelta(
                version=PolicyVersion(base + 1),
                base_version=base,
                patches=patches,
                changed=sum(patch.changed for patch in patches),
                diff_s=time.perf_counter() - started,
            )
            return self._pending

    def commit(self, pending: PendingDelta) -> Published:
        """Encode, upload, commit. The version is visible when this returns, and not before.

        Raises Fenced (stop training on this run), StoreError or StoreUnavailable (go on; the next
        diff contains this one's changes, unless it turns out to have been committed).
        """
        if pending is not self._pending:
            raise ValueError(f"version {pending.version} was committed or discarded already")
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=self._work.name) as folder:
            try:
                link, new_digest, encode_s, upload_s = self._store_delta(pending, Path(folder))
            except BaseException:
                self._discard()
                raise
        sent = time.perf_counter()
        try:
            self._ledger.write(version=pending.version, add=[link])
        except StoreUnavailable:
            with self._turn:
                self._unsettled = new_digest
                self._turn.notify_all()
            raise
        except BaseException:
            self._discard()
            raise
        self._advance(new_digest)
        now = time.perf_counter()
        record = _record(pending, link, self.layout).model_copy(
            update={
                "encode_s": encode_s,
                "upload_s": upload_s,
                "commit_s": now - sent,
                "total_s": pending.diff_s + now - begun,
            }
        )
        return Published(link=link, record=record)

    def discard(self, pending: PendingDelta) -> None:
        """Give up a diff without committing it; the next one contains its changes."""
        if pending is self._pending:
            self._discard()

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Diff and commit in one call, for loops that have no thread to spare."""
        return self.commit(self.diff(named_tensors))

    def sweep(self, *, grace_s: float = GRACE_S) -> list[str]:
        """Remove objects of the run that no link names, once they are `grace_s` old.

        What crashed trainers left half done and what retention unlinked. Returns the keys.
        """
        head = self._ledger.head
        listing = self.store.list(in_run(head.run_id, ""))
        left = plan_sweep(
            listing, head, now_s=time.time(), grace_s=grace_s, arriving=self._arriving(head)
        )
        self.store.delete([info.key for info in left])
        return [info.key for info in left]

    def finish(self) -> Head:
        """A last anchor, so that joiners of a finished run need one object; state `finished`."""
        with self._turn:
            self._turn.wait_for(lambda: self._pending is None or self._unsettled is not None)
            self._settle()
        self.wait_for_anchor()
        newest = max(
            (link.version for link in self.head.links if link.kind is ObjectKind.ANCHOR), default=-1
        )
        if newest < self.version:
            self._write_anchor(self.version, dict(self._shadow.named_bits()), self._digest)
        return self._ledger.write(state="finished")

    def wait_for_anchor(self) -> None:
        """Return when no anchor is on its way."""
        if self._anchor is not None:
            self._anchor.result()

    def close(self) -> None:
        """Stop background work and let go of the owner file. The store is the caller's."""
        self._anchors.shutdown(wait=True)
        self._work.cleanup()
        if self._owner_file is not None:
            self._owner_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store_delta(
        self, pending: PendingDelta, folder: Path
    ) -> tuple[Link, Digest, float, float]:
        """The encode and upload phases: (link, digest after it, seconds of each)."""
        begun = time.perf_counter()
        new_digest = self._digest.updated(pending.patches, self.layout)
        header = ObjectHeader(
            sparse=True,
            model_version=pending.version,
            base_version=pending.base_version,
            run_id=self.run_id,
            base_digest=str(self._digest),
            new_digest=str(new_digest),
        )
        path = folder / "delta.safetensors"
        report = encode_delta(
            pending.patches,
            header,
            path,
            layout=self.layout,
            encoding=self._encoding,
            base=self._shadow.before(pending.patches),
        )
        encoded = time.perf_counter()
        if report.larger_than_anchor:
            bits = dict(self._shadow.named_bits())
            link = self._upload_anchor(pending.version, bits, new_digest, folder)
        else:
            link = self._ledger.under_free_key(
                lambda epoch: upload_object(
                    self.store, path, report.header, kind=ObjectKind.DELTA, epoch=epoch
                )
            )
        return link, new_digest, encoded - begun, time.perf_counter() - encoded

    def _arriving(self, head: Head) -> set[str]:
        """Keys that this publisher may be uploading now."""
        ahead = [(kind, head.version + 1) for kind in (ObjectKind.DELTA, ObjectKind.ANCHOR)]
        behind = [(ObjectKind.ANCHOR, self._anchor_version)]
        epoch = self._ledger.claim.epoch
        return {object_key(kind, v, epoch=epoch) for kind, v in ahead + behind}

    def _advance(self, new_digest: Digest) -> None:
        """The version is committed. An anchor of it is begun before the next diff may run."""
        with self._turn:
            self._shadow.commit()
            self._digest = new_digest
            self._pending = self._unsettled = None
            self._start_anchor_if_due()
            self._turn.notify_all()

    def _discard(self) -> None:
        """The version failed: take the shadow back, and leave its keys behind."""
        with self._turn:
            self._shadow.rollback()
            self._ledger.raise_epoch()
            self._pending = self._unsettled = None
            self._turn.notify_all()

    def _settle(self) -> None:
        """After a commit whose answer was lost: look, and take it as committed or as failed."""
        if self._unsettled is None or self._pending is None:
            return
        if self._ledger.settle().version == self._pending.version:
            self._advance(self._unsettled)
        else:
            self._discard()

    def _start_anchor_if_due(self) -> None:
        head = self._ledger.head
        running = self._anchor is not None and not self._anchor.done()
        if running or not anchor_due(head.links, version=head.version, cadence=self._cadence):
            return
        bits = {name: held.copy() for name, held in self._shadow.named_bits()}
        self._anchor_version = head.version
        self._anchor = self._anchors.submit(
            self._background_anchor, head.version, bits, self._digest
        )

    def _background_anchor(
        self, version: PolicyVersion, bits: Mapping[str, BitArray], digest: Digest
    ) -> None:
        """Border of the background thread: a failed anchor is due again after the next version."""
        try:
            self._write_anchor(version, bits, digest)
            self.sweep()
        except Fenced:
            log.warning("anchor refused", extra={"version": version})
        except DeltawireError as error:
            log.warning("anchor failed", extra={"version": version, "reason": str(error)})

    def _write_anchor(
        self, version: PolicyVersion, bits: Mapping[str, BitArray], digest: Digest
    ) -> None:
        """Upload an anchor, link it, and unlink what no route needs any more."""
        with tempfile.TemporaryDirectory(dir=self._work.name) as folder:
            link = self._upload_anchor(version, bits, digest, Path(folder))
        head = self._ledger.head
        wider = head.model_copy(update={"links": [*head.links, link]})
        plan = plan_links(wider, keep_versions=self._keep_versions)
        self._ledger.write(add=[link], drop=plan.drop)

    def _upload_anchor(
        self, version: PolicyVersion, bits: Mapping[str, BitArray], digest: Digest, folder: Path
    ) -> Link:
        return self._ledger.under_free_key(
            lambda epoch: upload_anchor(
                self.store,
                bits,
                layout=self.layout,
                version=version,
                run_id=self.run_id,
                digest=digest,
                epoch=epoch,
                packed=self._packed,
                folder=folder,
            )
        )


def _record(pending: PendingDelta, link: Link, layout: Layout) -> SyncRecord:
    total = layout.total_elements
    return SyncRecord(
        version=pending.version,
        kind=str(link.kind),
        encoding=link.encoding,
        key=link.key,
        bytes=link.bytes,
        full_bytes=layout.nbytes,
        changed=pending.changed,
        total=total,
        density=pending.changed / total if total else 0.0,
        diff_s=pending.diff_s,
        encode_s=0.0,
        upload_s=0.0,
        commit_s=0.0,
        announce_s=0.0,
        total_s=0.0,
    )
