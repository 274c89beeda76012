"""Turn tickets into groups: claim, run the episodes, finish; give back what cannot be finished.

The same code runs inside a replica, beside the trainer, and in a Space. A lease is kept by
heartbeats while its episodes run; when it is lost the work is dropped. A producer that is drained
finishes what it has begun within a time limit and gives the rest back; one that is killed is
noticed by the silence of its heartbeats.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from deltawire.protocol.errors import (
    EngineError,
    LeaseLost,
    PayloadTooLarge,
    RemoteError,
    StreamError,
    StreamUnavailable,
)
from deltawire.protocol.rollouts import Rollout, RolloutGroup
from deltawire.rollout.completer import Completer
from deltawire.rollout.environment import EnvironmentClient
from deltawire.rollout.group import StragglerPolicy, Workshop, run_group
from deltawire.rollout.policy import PolicyClient
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.waits import Waits
from deltawire.streams.backoff import backoff_s
from deltawire.streams.base import Lease, ProducerStreams

_BEATS_PER_LEASE = 4.5
"""So that a few heartbeats may be lost."""
_GIVE_BACK_S = 5.0

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ProducerCounters:
    """What became of the tickets, since the start of the process."""

    groups_finished: int = 0
    groups_doubled: int = 0
    """Finished, but another producer had been quicker."""
    groups_given_back: int = 0
    leases_lost: int = 0
    groups_failed: int = 0
    """Ended by an error nobody foresaw; the ticket runs into its lease."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """By status."""
    tokens_sampled: int = 0
    episodes_running: int = 0


class Producer:
    """claiming -> draining -> stopped. One `run()` per instance."""

    def __init__(
        self,
        *,
        streams: ProducerStreams,
        policy: PolicyClient,
        environment: EnvironmentClient,
        renderer: Renderer,
        consumer: str = "",
        concurrency: int = 16,
        stragglers: StragglerPolicy | None = None,
        claim_s: float = 2.0,
    ) -> None:
        """`consumer` must be unique among live producers; by default it is drawn.

        `concurrency`: a further ticket is claimed while fewer episodes than this are running, so
        that at most one group more than this is under way. `claim_s`: longest wait in one claim; a
        drain is noticed in between.
        """
        self.consumer = consumer or f"producer-{uuid.uuid4().hex[:12]}"
        self.counters = ProducerCounters()
        self._streams = streams
        self._waits = Waits()
        self._shop = Workshop(
            environment=environment,
            renderer=renderer,
            completer=Completer(policy, waits=self._waits),
            waits=self._waits,
        )
        self._concurrency = concurrency
        self._stragglers = stragglers or StragglerPolicy()
        self._claim_s = claim_s
        self._working: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._failures_in_a_row = 0

    @property
    def waits_for(self) -> str:
        """tickets, environment, engine, weights or nothing: what holds the producer up."""
        return self._waits.most

    def pause(self) -> None:
        """Claim nothing for now; what runs goes on."""
        self._open.clear()

    def resume(self) -> None:
        """Claim again."""
        self._open.set()

    def drain(self) -> None:
        """Claim nothing more; `run` returns when what runs has finished, or its time is over."""
        self._draining.set()
        self._open.set()

    async def run(self, *, drain_s: float = 30.0) -> None:
        """Produce until drained or cancelled. What is unfinished then is given back."""
        try:
            while not self._draining.is_set():
                await self._open.wait()
                if self.counters.episodes_running >= self._concurrency:
                    await self._until_draining(self._working)
                elif (lease := await self._claim()) is None:
                    continue
                elif self._draining.is_set():
                    await self._give_back(lease, reason="the producer drains")
                else:
                    self._begin(lease)
            if self._working:
                await asyncio.wait(self._working, timeout=drain_s)
        finally:
            for task in self._working:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)

    async def _claim(self) -> Lease | None:
        if self._failures_in_a_row:
            wait_s = backoff_s(self._failures_in_a_row, first_s=0.25)
            await self._until_draining((), timeout_s=wait_s)
        claiming = asyncio.ensure_future(
            self._streams.claim(self.consumer, timeout_s=self._claim_s)
        )
        try:
            with self._waits.on("tickets"):
                await self._until_draining((claiming,))
                # A ticket that is on its way is better given back than left to its lease.
                done, _ = await asyncio.wait((claiming,), timeout=self._claim_s)
            return claiming.result() if done else None
        except StreamUnavailable as error:
            log.warning("streams unavailable", extra={"reason": str(error)})
            self._failures_in_a_row += 1
            return None
        finally:
            claiming.cancel()
            await asyncio.gather(claiming, return_exceptions=True)

    async def _until_draining(
        self, works: Collection[asyncio.Future[Any]], *, timeout_s: float | None = None
    ) -> None:
        """Return when one of these is done, the time is over, or the drain begins."""
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait(
                (*works, draining), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            draining.cancel()

    def _begin(self, lease: Lease) -> None:
        self.counters.episodes_running += lease.ticket.group_size
        task = asyncio.create_task(self._work(lease))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _work(self, lease: Lease) -> None:
        """The border of one ticket: whatever goes wrong in it leaves the others alone."""
        ticket_id = lease.ticket.ticket_id
        try:
            await self._finish(lease, await self._kept_alive(lease))
            self._failures_in_a_row = 0
        except LeaseLost as error:
            self.counters.leases_lost += 1
            log.warning("lease lost", extra={"ticket": ticket_id, "reason": str(error)})
        except (EngineError, RemoteError) as error:
            self._failures_in_a_row += 1
            await self._give_back(lease, reason=f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            await self._give_back(lease, reason="the producer stops")
            raise
        except Exception as error:
            # Not given back: a ticket that breaks producers must grow old and be buried.
            self.counters.groups_failed += 1
            self._failures_in_a_row += 1
            log.exception("group failed", extra={"ticket": ticket_id, "reason": repr(error)})
        finally:
            self.counters.episodes_running -= lease.ticket.group_size

    async def _kept_alive(self, lease: Lease) -> RolloutGroup:
        """The group, made under heartbeats. Raises LeaseLost as soon as the lease is lost."""
        beating = asyncio.create_task(self._beat(lease))
        making = asyncio.create_task(
            run_group(
                lease.ticket, self._shop, producer_id=self.consumer, stragglers=self._stragglers
            )
        )
        try:
            await asyncio.wait({beating, making}, return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                beating.result()
            return making.result()
        finally:
            beating.cancel()
            making.cancel()
            await asyncio.gather(beating, making, return_exceptions=True)

    async def _beat(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(lease.lasts_s / _BEATS_PER_LEASE)
            try:
                await self._streams.heartbeat(lease)
            except StreamUnavailable as error:
                log.warning("heartbeat missed", extra={"reason": str(error)})

    async def _finish(self, lease: Lease, group: RolloutGroup) -> None:
        """Append the group, however long the streams are away: it took long to make."""
        key = uuid.uuid4().hex
        while True:
            try:
                added = await self._streams.finish(lease, group, idempotency_key=key)
                break
            except StreamUnavailable as error:
                log.warning("group waits for streams", extra={"reason": str(error)})
            except PayloadTooLarge as error:
                group = _without_tokens(group, str(error))
        self._count(group, added=added)

    def _count(self, group: RolloutGroup, *, added: bool) -> None:
        self.counters.groups_finished += added
        self.counters.groups_doubled += not added
        for rollout in group.rollouts:
            self.counters.rollouts[rollout.status] += 1
            self.counters.tokens_sampled += sum(sum(s.loss_mask) for s in rollout.sequences)

    async def _give_back(self, lease: Lease, *, reason: str) -> None:
        self.counters.groups_given_back += 1
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await self._streams.give_back(lease, reason=reason)
        except (StreamError, TimeoutError) as error:
            # Then it is reclaimed by its idle time.
            log.warning("ticket not given back", extra={"reason": str(error)})


def _without_tokens(group: RolloutGroup, reason: str) -> RolloutGroup:
    """A group that is too large to travel becomes the news of it.

    Nothing that an environment gave is kept: what it said of an episode may be what is too large.
    """
    return group.model_copy(
        update={
            "rollouts": [
                Rollout(
                    rollout_id=rollout.rollout_id,
                    status="error",
                    reason=reason,
                    sequences=[],
                    timings_s=rollout.timings_s,
                    replica_id=rollout.replica_id,
                    environment_id=rollout.environment_id,
                )
                for rollout in group.rollouts
            ],
        }
    )
