"""A replica: follows the chain, and serves what its engine holds.

    joining -> serving(v) -> staging(v') -> applying -> serving(v')
    any of them -> broken -> joining      weights that are not trusted are never served again
    any of them -> draining               SIGTERM: no new work

Guarantees: nothing is served from weights that failed a check; a failed update leaves the old
version serving; the same bad object is not tried twice; a notice only makes the replica look at its
own bucket, it never says where to look.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from deltawire.protocol.chain import Head, Link
from deltawire.protocol.control import AppliedUpdate, ReplicaState, WeightNotice
from deltawire.protocol.errors import (
    ChecksumMismatch,
    DeltawireError,
    DigestMismatch,
    InvalidKey,
    ObjectMissing,
    ReplicaBroken,
    WeightsError,
)
from deltawire.protocol.generation import GenerateRequest, GenerateResponse
from deltawire.protocol.versions import PolicyVersion
from deltawire.service.metrics import Metrics
from deltawire.sync.follower import Fetched, Follower
from deltawire_inference.engines.base import ApplyReport, Engine, SampledToken, SwapMode
from deltawire_inference.history import UpdateHistory
from deltawire_inference.routing import Routing

log = logging.getLogger(__name__)

T = TypeVar("T")

_SOON_S = 0.25
"""Pause before another look when a notice spoke of a version that latest.json does not name yet."""
_SOON_TRIES = 20
"""A notice may be wrong, or may lie: after this many looks only the slow poll goes on."""
_LONGEST_RETRY_S = 30.0
_SWAP_MODE: SwapMode = "keep"
"""When neither this replica nor the run's job says."""


class Replica:
    """One engine on one run. `run` is its life; everything else may be called beside it."""

    def __init__(
        self,
        *,
        replica_id: str,
        follower: Follower,
        engine: Engine,
        metrics: Metrics,
        poll_s: float,
        swap_mode: SwapMode | None,
        verify_s: float = 0.0,
    ) -> None:
        self.replica_id = replica_id
        self.follower = follower
        self.engine = engine
        self.state: ReplicaState = "joining"
        self.history = UpdateHistory()
        self.routing = Routing()
        self.last_error = ""
        self.head_version: PolicyVersion | None = None
        self._metrics = metrics
        self.swap_mode: SwapMode = swap_mode or _SWAP_MODE
        self._own_swap_mode = swap_mode
        self._poll_s, self._verify_s = poll_s, verify_s
        self._wake = asyncio.Event()
        self._joined = asyncio.Event()
        self._noticed: int = -1
        self._soon_tries = 0
        self._failures = 0
        self._verified_at = 0.0

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Sample, signed with the replica's id. ReplicaBroken while nothing may be served, and for
        what was sampled from weights that turned out wrong meanwhile."""
        self._require_trusted()
        answer = await self.engine.generate(request)
        self._require_trusted()
        return answer.model_copy(update={"replica_id": self.replica_id})

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[SampledToken, None]:
        """Sample token by token. ReplicaBroken as `generate`."""
        self._require_trusted()
        async with aclosing(self.engine.stream(request)) as tokens:
            async for token in tokens:
                self._require_trusted()
                yield token

    def _require_trusted(self) -> None:
        if self.state in ("joining", "broken"):
            raise ReplicaBroken(f"no trusted weights are loaded: {self.state}")

    def notice(self, notice: WeightNotice) -> None:
        """Look at the bucket now. InvalidKey for a notice about another bucket, run or file."""
        if not self.follower.accepts(notice):
            raise InvalidKey(
                f"{notice.repo_id!r} {notice.filename!r} is not an object of run "
                f"{self.follower.run_id!r} in the bucket this replica follows"
            )
        self._noticed = max(self._noticed, notice.version or -1)
        self._soon_tries = 0
        self._wake.set()

    async def joined(self) -> None:
        """Return once a first version is served."""
        await self._joined.wait()

    def drain(self) -> None:
        """Take no new work; stays so until the end."""
        self.state = "draining"

    async def run(self) -> None:
        """Follow until cancelled. A store that can tell of changes wakes it like a notice does."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        watch = self.follower.watch(wake)
        try:
            await self._follow()
        finally:
            if watch is not None:
                watch.close()

    async def _follow(self) -> None:
        while True:
            try:
                await self._look()
                self._failures = 0
                self.last_error = ""
            except DeltawireError as error:
                self._failed(error)
            except Exception as error:  # the replica's border: whatever happens, it goes on serving
                log.exception("following failed", extra={"reason": repr(error)})
                self._failed(error)
            await self._sleep()

    async def _look(self) -> None:
        """One look at the bucket: join, or move on to the newest version."""
        head = await self._read_head()
        if self.engine.version is None:
            await self._join(head)
            return
        await self._check_own_weights(head)
        while self.engine.version is not None and self.engine.version < head.version:
            await self._advance(head)
            head = await self._read_head()

    async def _read_head(self) -> Head:
        head = await asyncio.to_thread(self.follower.head)
        self.head_version = head.version
        self.swap_mode = self._own_swap_mode or head.swap_mode or _SWAP_MODE
        return head

    async def _join(self, head: Head) -> None:
        """Load from an anchor to the newest version."""
        self._enter("joining")
        started = time.perf_counter()
        route = self.routing.plan(head, have=None)
        model_dir = await asyncio.to_thread(self.follower.model_dir)
        objects = await self._fetch(route)
        fetched = time.perf_counter()
        manifest = await asyncio.to_thread(self.follower.manifest)
        await self._blaming(
            route,
            self.engine.start(model_dir, objects, manifest=manifest, version=route[-1].version),
        )
        await self._verify()
        self._record(
            route,
            base_version=None,
            fetch_s=fetched - started,
            stage_s=time.perf_counter() - fetched,
        )
        self.routing.arrived()
        self._enter("serving")
        self._joined.set()

    async def _advance(self, head: Head) -> None:
        """One swap. On any error the old version goes on serving."""
        have = self.engine.version
        route = self.routing.plan(head, have=have)
        self._enter("staging")
        try:
            started = time.perf_counter()
            objects = await self._fetch(route)
            fetched = time.perf_counter()
            staged = await self._blaming(route, self.engine.stage(objects))
            staged_at = time.perf_counter()
            self._enter("applying")
            report = await self.engine.apply(staged, mode=self.swap_mode)
            self._record(
                route,
                base_version=have,
                fetch_s=fetched - started,
                stage_s=staged_at - fetched,
                changed=staged.changed,
                report=report,
            )
        finally:
            self._enter("broken" if self.engine.version is None else "serving")
        self.routing.arrived()

    async def _check_own_weights(self, head: Head) -> None:
        """ReplicaBroken, and nothing is served any more, when they are not what they should be."""
        version = self.engine.version
        expected = head.link_digest(version) if version is not None else None
        if expected not in (None, self.engine.digest):
            await self._break(f"version {version} has digest {expected} in the bucket, not here")
        if self._verify_s and time.monotonic() - self._verified_at > self._verify_s:
            await self._verify()

    async def _verify(self) -> None:
        """Recompute the digest over all live weights."""
        with self._metrics.span("verify"):
            found = await self.engine.verify()
        self._verified_at = time.monotonic()
        if found != self.engine.digest:
            await self._break(f"live weights have digest {found}, {self.engine.digest} expected")

    async def _break(self, reason: str) -> None:
        """Stop serving at once; the next look joins anew, from an anchor."""
        self._enter("broken")
        self._metrics.count("replica_broken")
        await self.engine.close()
        raise ReplicaBroken(reason)

    async def _fetch(self, route: Sequence[Link]) -> Fetched:
        try:
            with self._metrics.span("fetch"):
                return await asyncio.to_thread(self.follower.fetch, route)
        except ChecksumMismatch as error:
            self.routing.damaged(route, error.key)
            raise

    async def _blaming(self, route: Sequence[Link], work: Awaitable[T]) -> T:
        """Run what reads a route; when it is refused, find out which object is to blame."""
        try:
            return await work
        except WeightsError as error:
            self._wake.set()  # try again at once, another way
            blamed = self.routing.suspect(route)
            if blamed is not None:
                if isinstance(error, DigestMismatch) and self.engine.version is not None:
                    await self._verify()  # if it is our weights that are wrong, the object is not
                self.routing.refuse(blamed)
                self._metrics.count("updates_rejected")
            raise

    def _record(
        self,
        route: Sequence[Link],
        *,
        base_version: PolicyVersion | None,
        fetch_s: float,
        stage_s: float,
        changed: int | None = None,
        report: ApplyReport | None = None,
    ) -> None:
        last = route[-1]
        total = last.total or 0
        pause_ms = 0.0 if report is None else report.pause_s * 1e3
        update = AppliedUpdate(
            version=last.version,
            base_version=base_version,
            kind=last.kind,
            encoding=last.encoding,
            bytes=sum(link.bytes for link in route),
            changed=total if changed is None else changed,
            total=total,
            fetch_s=fetch_s,
            stage_s=stage_s,
            pause_ms=pause_ms,
            applied_at=time.time(),
            mode="" if report is None else report.mode,
            recomputed_tokens=0 if report is None else report.recomputed_tokens,
        )
        self.history.add(update)
        if report is not None:
            self._metrics.observe("swap_pause", report.pause_s)
        self._metrics.set("policy_version", last.version)
        log.info(
            "version applied",
            extra={
                "version": last.version,
                "kind": last.kind.value,
                "bytes": update.bytes,
                "changed": update.changed,
                "pause_ms": round(pause_ms, 2),
            },
        )

    def _enter(self, state: ReplicaState) -> None:
        if self.state != "draining":
            self.state = state

    def _failed(self, error: Exception) -> None:
        waits = isinstance(error, ObjectMissing) and self.engine.version is None
        self._failures += not waits
        text = f"{type(error).__name__}: {error}"
        if text != self.last_error and not waits:
            log.warning("update failed", extra={"reason": text, "version": self.engine.version})
        self.last_error = text

    async def _sleep(self) -> None:
        """Until a notice, or the next poll; sooner when a notice spoke of more than was found."""
        wait_s = self._poll_s
        ahead = self._noticed > (self.head_version if self.head_version is not None else -1)
        if self.engine.version is None:
            wait_s = min(wait_s, 1.0)
        if ahead and self._soon_tries < _SOON_TRIES:
            self._soon_tries += 1
            wait_s = min(wait_s, _SOON_S)
        if self._failures > 1:
            wait_s = min(_LONGEST_RETRY_S, wait_s * 2 ** min(self._failures - 1, 10))
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()
