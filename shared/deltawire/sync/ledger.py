"""latest.json as its only writer sees it: read once, then every change swapped in.

Guarantees: a change is visible whole or not at all; a writer that lost the run learns it here, as
Fenced, before anything of its next version is visible. When the store goes away in the middle of
a write the outcome is unknown; the ledger then refuses to go on until `settle` has looked.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from deltawire.protocol.chain import Head, Link, SwapMode
from deltawire.protocol.errors import Fenced, ObjectExists, ObjectMissing, StoreUnavailable
from deltawire.protocol.layout import LATEST_KEY, in_run
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.fence import Claim, check_claim, claim_run
from deltawire.sync.heads import as_bytes, parse_head


class Ledger:
    """Thread-safe: deltas and background anchors write through the same one."""

    def __init__(
        self,
        store: Store,
        head: Head,
        *,
        claim: Claim,
        etag: str | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._head, self._claim, self._etag = store, head, claim, etag
        self._clock = clock
        self._unsettled: Head | None = None
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        store: Store,
        run_id: str,
        *,
        owner: str,
        take_over: bool = False,
        swap_mode: SwapMode | None = None,
    ) -> "Ledger":
        """Claim a run, new or existing, and write the claim. Raises Fenced when it is another's.

        `swap_mode` is written beside it: a restarted trainer may ask something else of replicas.
        """
        found, etag = read_head(store, run_id)
        now_s = time.time()
        claim = claim_run(found, owner=owner, take_over=take_over, now_s=now_s)
        head = (found or Head(run_id=run_id)).model_copy(update={"swap_mode": swap_mode})
        ledger = cls(store, head, claim=claim, etag=etag)
        ledger.write(state="running")
        return ledger

    @property
    def head(self) -> Head:
        """The newest committed state."""
        return self._head

    @property
    def claim(self) -> Claim:
        """What this writer holds."""
        return self._claim

    def raise_epoch(self) -> None:
        """Begin a new epoch of the same owner, so that keys of a failed attempt are never met."""
        with self._lock:
            self._claim = self._claim.raised()

    def under_free_key(self, upload: Callable[[int], Link]) -> Link:
        """Call `upload` with an epoch whose keys are free.

        A dead process may have raised its epoch without a commit and left objects under the epoch
        claimed here; then the next one is taken. Raises Fenced when it is not a dead process.
        """
        while True:
            try:
                return upload(self._claim.epoch)
            except ObjectExists:
                self._check()
                self.raise_epoch()

    def write(
        self,
        *,
        version: int | None = None,
        add: Sequence[Link] = (),
        drop: Sequence[Link] = (),
        state: Literal["running", "finished"] | None = None,
    ) -> Head:
        """Commit a change. Raises Fenced, or StoreUnavailable with the outcome unknown."""
        with self._lock:
            self.settle()
            gone = {link.key for link in drop}
            kept = [link for link in self._head.links if link.key not in gone]
            head = self._head.model_copy(
                update={
                    "version": PolicyVersion(self._head.version if version is None else version),
                    "links": sorted([*kept, *add], key=lambda link: (link.version, link.kind)),
                    "state": state or self._head.state,
                    "owner": self._claim.owner,
                    "epoch": self._claim.epoch,
                    "updated_at": self._clock(),
                }
            )
            self._swap(head)
            return head

    def settle(self) -> Head:
        """Learn what became of a write whose answer was lost. Raises StoreUnavailable, Fenced."""
        with self._lock:
            if self._unsettled is not None:
                found, etag = read_head(self._store, self._head.run_id)
                if found == self._unsettled:
                    self._head, self._etag = found, etag
                elif etag != self._etag:
                    self._lost(found)
                self._unsettled = None
            return self._head

    def _check(self) -> None:
        """Raise Fenced unless latest.json is as this writer left it."""
        with self._lock:
            self.settle()
            found, etag = read_head(self._store, self._head.run_id)
            if etag != self._etag:
                self._lost(found)

    def _swap(self, head: Head) -> None:
        body = as_bytes(head)
        try:
            info = self._store.swap(in_run(head.run_id, LATEST_KEY), body, expect=self._etag)
        except StoreUnavailable:
            self._unsettled = head
            raise
        except Fenced:
            # A swap that the store's client repeated may have met its own first attempt.
            found, etag = read_head(self._store, head.run_id)
            if found != head:
                self._lost(found)
            self._head, self._etag = head, etag
        else:
            self._head, self._etag = head, info.etag

    def _lost(self, found: Head | None) -> None:
        if found is not None:
            check_claim(found, self._claim)
        raise Fenced(
            f"latest.json of run {self._head.run_id!r} was changed or removed by somebody else; "
            "this trainer must stop"
        )


def read_head(store: Store, run_id: str) -> tuple[Head | None, str | None]:
    """latest.json and its etag; (None, None) when there is none yet."""
    try:
        body, info = store.read(in_run(run_id, LATEST_KEY))
    except ObjectMissing:
        return None, None
    return parse_head(body, run_id=run_id), info.etag
