"""Syncs beside training: a version is encoded, uploaded, committed and announced meanwhile."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from pydantic import SecretStr

from deltawire.protocol.control import ReplicaStatus, SyncRecord, WeightNotice
from deltawire.protocol.errors import Fenced, StoreError, StreamError
from deltawire.streams.base import TrainerStreams
from deltawire.sync.publisher import PendingDelta, Published, Publisher
from deltawire_trainer.announcer import announce, notice_of

log = logging.getLogger(__name__)


class Publishing:
    """At most one version is on its way. Training waits for it only before the next diff."""

    def __init__(
        self, publisher: Publisher, streams: TrainerStreams, *, token: SecretStr | None
    ) -> None:
        self.publisher = publisher
        self._streams = streams
        self._token = token
        self.task: asyncio.Task[None] | None = None
        self.newest: Published | None = None
        self.failed = False
        """Whether the last version did not reach the bucket; the next diff contains it."""
        self._fenced: Fenced | None = None

    def start(self, pending: PendingDelta, done: Callable[[SyncRecord], Awaitable[None]]) -> None:
        """Send a version on its way; `done` is told once it is announced."""
        assert not self.busy
        self.failed = False
        self.task = asyncio.create_task(self._publish(pending, done))

    @property
    def busy(self) -> bool:
        """Whether a version is on its way."""
        return self.task is not None and not self.task.done()

    async def settled(self) -> None:
        """Return when nothing is on its way. Raises Fenced when this trainer must stop."""
        if self.task is not None:
            await self.task
        if self._fenced is not None:
            raise self._fenced

    async def _publish(
        self, pending: PendingDelta, done: Callable[[SyncRecord], Awaitable[None]]
    ) -> None:
        try:
            published = await asyncio.to_thread(self.publisher.commit, pending)
        except Fenced as error:
            self._fenced = error
            return
        except StoreError as error:
            # The next diff finds these changes again: late, not lost.
            self.failed = True
            log.warning(
                "version not published", extra={"version": pending.version, "reason": str(error)}
            )
            return
        self.newest = published
        started = time.perf_counter()
        told = await self._announce(self.notice())
        announce_s = time.perf_counter() - started
        record = published.record.model_copy(
            update={"announce_s": announce_s, "total_s": published.record.total_s + announce_s}
        )
        _log_sync(record, told)
        await done(record)

    def notice(self) -> WeightNotice | None:
        """Coordinates of the newest version, published by this process or by the one before."""
        links = [self.newest.link] if self.newest else self.publisher.head.links
        if not links:
            return None
        return notice_of(
            max(links, key=lambda link: link.version),
            store_uri=self.publisher.store.uri,
            run_id=self.publisher.run_id,
        )

    async def replicas(self) -> list[ReplicaStatus]:
        """Replicas with a live heartbeat; none while the streams are away."""
        try:
            return await self._streams.replicas()
        except StreamError as error:
            log.info("registry not read", extra={"reason": str(error)})
            return []

    async def _announce(self, notice: WeightNotice | None) -> int:
        if notice is None:
            return 0
        return await announce(notice, await self.replicas(), token=self._token)


def _log_sync(record: SyncRecord, told: int) -> None:
    log.info(
        "version committed",
        extra={
            "version": record.version,
            "key": record.key,
            "changed": record.changed,
            "of": record.total,
            "density": record.density,
            "bytes": record.bytes,
            "full_bytes": record.full_bytes,
            "diff_s": record.diff_s,
            "encode_s": record.encode_s,
            "upload_s": record.upload_s,
            "commit_s": record.commit_s,
            "announce_s": record.announce_s,
            "replicas_told": told,
        },
    )
