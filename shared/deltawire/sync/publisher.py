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

import hashlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from deltawire.codec.bits import BitArray
from deltawire.codec.digest import Digest
from deltawire.codec.encode import EncodeReport, Encoding, encode_delta
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.adapters import AdapterManifest
from deltawire.protocol.chain import Head, Link, SwapMode
from deltawire.protocol.control import SyncRecord
from deltawire.protocol.errors import StoreUnavailable
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.adapters import AdapterBits, WholeAdapters
from deltawire.sync.background import Background
from deltawire.sync.choice import EncodingChoice
from deltawire.sync.fence import OwnerFile
from deltawire.sync.founding import Entered, enter_run
from deltawire.sync.ledger import Ledger
from deltawire.sync.options import ANCHOR_SHARD_BYTES, KEEP_VERSIONS, PublishOptions
from deltawire.sync.published import PublishedBits, WholeBits
from deltawire.sync.retention import GRACE_S, outlived
from deltawire.sync.scratch import scratch_folder
from deltawire.sync.upload import upload_object

_WORK_PREFIX = "deltawire-publish-"


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
        bits: PublishedBits,
        *,
        options: PublishOptions,
        owner_file: OwnerFile | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """For a run that was entered (see founding.py); `open` does both."""
        self.store = store
        self._ledger = ledger
        self._bits = bits
        self._digest = bits.digest()
        self._choice = EncodingChoice(options.encoding)
        self._keep_versions = options.keep_versions
        self._adapters: WholeAdapters | None = None
        if isinstance(bits, AdapterBits) and options.adapter is not None:
            self._adapters = WholeAdapters(store, ledger, bits, options.adapter)
        self._clock = clock
        self._owner_file = owner_file
        self._work = _work_folder(owner_file)
        self._background = Background(
            store, ledger, bits.layout, work=Path(self._work.name), options=options
        )
        self._turn = threading.Condition()
        self._pending: PendingDelta | None = None
        self._unsettled: Digest | None = None

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
        anchor_shard_bytes: int = ANCHOR_SHARD_BYTES,
        keep_versions: int = KEEP_VERSIONS,
        skip_levels: Sequence[int] = (),
        swap_mode: SwapMode | None = None,
        owner_file: Path | None = None,
        take_over: bool = False,
        adapter: AdapterManifest | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Self:
        """Found a run (run.json, model files, anchor 0) or go on with one.

        fp32 tensors are masters and are published as `master_dtype`. `skip_levels` (say (4, 16))
        also publishes merged files that lead over so many versions at once. `swap_mode` is what
        replicas that were not told otherwise do to running requests. With `adapter` only its
        tensors, named by PEFT's keys, are looked at once the run is open.

        A run that exists is gone on with when `owner_file` is the one it was founded with, or with
        `take_over`; its head need not equal the tensors given: the next diff is taken against what
        was really published.
        Raises Fenced when the run is another trainer's, LayoutMismatch for another model.
        """
        tensors = list(named_tensors)
        layout, tied = Layout.of_tensors(tensors, master_dtype=master_dtype)
        options = PublishOptions(
            encoding=encoding,
            anchor_every=anchor_every,
            anchor_packed=anchor_packed,
            anchor_shard_bytes=anchor_shard_bytes,
            keep_versions=keep_versions,
            skip_levels=tuple(skip_levels),
            swap_mode=swap_mode,
            adapter=adapter,
        )
        entered = enter_run(
            store,
            WholeBits.holding(tensors, layout),
            tied,
            run_id=run_id,
            base_model=base_model,
            model_files=dict(model_files or {}),
            options=options,
            owner_file=owner_file,
            take_over=take_over,
        )
        return cls.of_entered(store, entered, options=options, clock=clock)

    @classmethod
    def of_entered(
        cls,
        store: Store,
        entered: Entered,
        *,
        options: PublishOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Self:
        """For a run that this process has entered; takes its owner file over."""
        bits = entered.bits if options.adapter is None else AdapterBits.out_of(entered.bits)
        return cls(
            store,
            entered.ledger,
            bits,
            options=options,
            owner_file=entered.owner_file,
            clock=clock,
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
        return self._bits.layout

    def diff(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> PendingDelta:
        """What changed since the last committed version. One pass over the weights.

        Waits while the version before is still on its way. Raises StoreUnavailable when it is
        still unknown whether that one was committed, LayoutMismatch for other tensors.
        """
        with self._turn:
            self._wait_for_turn()
            started = self._clock()
            patches = self._bits.diff(named_tensors)
            base = self._ledger.head.version
            self._pending = PendingDelta(
                version=PolicyVersion(base + 1),
                base_version=base,
                patches=patches,
                changed=sum(patch.changed for patch in patches),
                diff_s=self._clock() - started,
            )
            return self._pending

    def settled(self) -> None:
        """Return when no version is on its way. Raises StoreUnavailable when it is not known
        whether the last one was committed."""
        with self._turn:
            self._wait_for_turn()

    def commit(self, pending: PendingDelta) -> Published:
        """Encode, upload, commit. The version is visible when this returns, and not before.

        Raises Fenced (stop training on this run), StoreError or StoreUnavailable (go on; the next
        diff contains this one's changes, unless it turns out to have been committed).
        """
        if pending is not self._pending:
            raise ValueError(f"version {pending.version} was committed or discarded already")
        begun = self._clock()
        with ExitStack() as undo:
            undo.callback(self._discard)
            with scratch_folder(Path(self._work.name)) as folder:
                stored = self._store_delta(pending, folder)
            sent = self._clock()
            gone = outlived(self._ledger.head, stored.link, keep_versions=self._keep_versions)
            try:
                self._ledger.write(version=pending.version, add=[stored.link], drop=gone)
            except StoreUnavailable:
                undo.pop_all()  # it may be committed all the same
                with self._turn:
                    self._unsettled = stored.digest
                    self._turn.notify_all()
                raise
            undo.pop_all()
        self._advance(pending, stored.digest)
        if gone:
            self._background.start_sweep()
        now = self._clock()
        record = _record(pending, stored, self.layout).model_copy(
            update={"commit_s": now - sent, "total_s": pending.diff_s + now - begun}
        )
        return Published(link=stored.link, record=record)

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
        return self._background.sweep(grace_s=grace_s)

    @property
    def anchor_due(self) -> bool:
        """Whether the newest version still needs an anchor, where no snapshot could be taken."""
        return self._background.anchor_due

    def start_anchor(self, bits: Mapping[str, BitArray]) -> None:
        """Write an anchor of the newest version in the background, from its bits."""
        self._background.start_anchor(bits, self._digest)

    def finish(self, bits: Mapping[str, BitArray] | None = None) -> Head:
        """A last anchor, so that joiners of a finished run need one object (in a LoRA run two: the
        base and a whole adapter); state `finished`.

        `bits` are the newest version's, where this process does not hold them.
        """
        self.settled()
        self.wait_for_anchor()
        if self._adapters is not None:
            self._link_whole_adapter(self._adapters)
        anchors = [link.version for link in self.head.links if link.kind is ObjectKind.ANCHOR]
        last = bits if bits is not None else self._bits.snapshot()
        if max(anchors, default=-1) < self.version and last is not None:
            self._background.write_anchor(self.version, last, self._digest)
        head = self._ledger.write(state="finished")
        self._background.start_sweep()
        return head

    def wait_for_anchor(self) -> None:
        """Return when neither an anchor nor a skip file is on its way."""
        self._background.wait()

    def close(self) -> None:
        """Finish background work and let go of the owner file. The store is the caller's."""
        self._background.close()
        self._work.cleanup()
        if self._owner_file is not None:
            self._owner_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store_delta(self, pending: PendingDelta, folder: Path) -> "_Stored":
        """The encode and upload phases."""
        begun = self._clock()
        new_digest = self._digest.updated(pending.patches, self.layout)
        path = folder / "delta.safetensors"
        report, reason = self._encode(pending, path, new_digest)
        encoded = self._clock()
        too_large = report.larger_than_anchor or report.bytes >= self._anchor_bytes()
        bits = self._bits.snapshot() if too_large else None
        if self._adapters is not None and self._adapters.better_than(report.bytes):
            reason = f"a delta of {report.bytes} bytes saves too little on the whole adapter"
            link = self._adapters.upload(pending.version, new_digest, folder)
        elif bits is not None:
            reason = f"a delta of {report.bytes} bytes is no smaller than an anchor"
            link = self._background.upload_anchor(pending.version, bits, new_digest)
        else:
            link = self._ledger.under_free_key(
                lambda epoch: upload_object(
                    self.store, path, report.header, kind=ObjectKind.DELTA, epoch=epoch
                )
            )
        upload_s = self._clock() - encoded
        self._choice.uploaded(link.bytes, upload_s)
        return _Stored(
            link=link,
            digest=new_digest,
            reason=reason,
            encode_s=encoded - begun,
            upload_s=upload_s,
        )

    def _link_whole_adapter(self, adapters: WholeAdapters) -> None:
        """See that the newest version can be had without a delta."""
        alone = [link.version for link in self.head.links if link.base_version is None]
        if max(alone, default=-1) < self.version:
            with scratch_folder(Path(self._work.name)) as folder:
                link = adapters.upload(self.version, self._digest, folder)
            self._ledger.write(add=[link])

    def _anchor_bytes(self) -> int:
        """What an anchor weighs, packed or not: the last one's size."""
        anchors = (link for link in self.head.links if link.kind is ObjectKind.ANCHOR)
        return max(anchors, key=lambda link: link.version).bytes

    def _encode(
        self, pending: PendingDelta, path: Path, new_digest: Digest
    ) -> tuple[EncodeReport, str]:
        """Write the delta file; what was written, and why in this encoding."""
        base = self._bits.before(pending.patches)
        total = self.layout.total_elements
        choice = self._choice.choose(
            changed=pending.changed, total=total, holds_base=base is not None
        )
        header = ObjectHeader(
            sparse=True,
            model_version=pending.version,
            base_version=pending.base_version,
            run_id=self.run_id,
            base_digest=str(self._digest),
            new_digest=str(new_digest),
        )
        begun = self._clock()
        report = encode_delta(
            pending.patches,
            header,
            path,
            layout=self.layout,
            encoding=choice.encoding,
            base=base,
        )
        self._choice.encoded(
            report.encoding, changed=pending.changed, total=total, seconds=self._clock() - begun
        )
        smaller = report.encoding == "seed" != choice.encoding
        return report, "seed is smaller for so few changes" if smaller else choice.reason

    def _wait_for_turn(self) -> None:
        """Until no version is on its way and it is known what became of the last one."""
        self._turn.wait_for(lambda: self._pending is None or self._unsettled is not None)
        if self._unsettled is None or self._pending is None:
            return
        if self._ledger.settle().version == self._pending.version:
            self._advance(self._pending, self._unsettled)
        else:
            self._discard()

    def _advance(self, pending: PendingDelta, new_digest: Digest) -> None:
        """The version is committed. An anchor of it is begun before the next diff may run."""
        with self._turn:
            self._bits.commit()
            self._digest = new_digest
            self._pending = self._unsettled = None
            self._background.add_delta(pending.version, pending.patches)
            if self.anchor_due and (bits := self._bits.snapshot()) is not None:
                self.start_anchor(bits)
            self._turn.notify_all()

    def _discard(self) -> None:
        """The version failed: take the shadow back, and leave its keys behind."""
        with self._turn:
            self._bits.rollback()
            self._ledger.raise_epoch()
            self._pending = self._unsettled = None
            self._turn.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A version whose object is in the store and not committed yet."""

    link: Link
    digest: Digest
    reason: str
    """Why it is encoded as it is."""
    encode_s: float
    upload_s: float


def _work_folder(owner_file: OwnerFile | None) -> "tempfile.TemporaryDirectory[str]":
    """Where objects are prepared. What a killed process of the same owner left there goes: the
    owner file is locked, so nobody works on it."""
    prefix = _WORK_PREFIX
    if owner_file is not None:
        prefix += f"{hashlib.sha256(owner_file.owner.encode()).hexdigest()[:16]}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=prefix)


def _record(pending: PendingDelta, stored: _Stored, layout: Layout) -> SyncRecord:
    link, total = stored.link, layout.total_elements
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
        encode_s=stored.encode_s,
        upload_s=stored.upload_s,
        commit_s=0.0,
        announce_s=0.0,
        total_s=0.0,
        encoding_reason=stored.reason,
    )
