"""Streams in one process: the twin of redis.py for tests and single-process runs.

It moves the same encoded bytes through the same states, and promises the same but one thing: what
it holds ends with the process.
"""

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import ProtocolError
from deltawire.protocol.rollouts import RolloutGroup, Ticket
from deltawire.streams.base import (
    LEASE_S,
    REMEMBERS_S,
    DeadLetter,
    DeliveredGroup,
    Depth,
    Lease,
    counted_reason,
    not_leased,
    not_open,
)
from deltawire.streams.records import (
    check_belongs,
    decode_group,
    decode_ticket,
    encode_group,
    encode_ticket,
)

_POLL_S = 0.01
"""How often a waiting call looks again."""


@dataclass(slots=True, kw_only=True)
class _OpenTicket:
    ticket_id: str
    body: bytes
    consumer: str | None = None
    """Who holds the lease; None while the ticket waits."""
    beat_at: float = 0.0
    deliveries: int = 0


@dataclass(slots=True, kw_only=True)
class _Group:
    group_id: str
    body: bytes
    delivered: bool = False


class MemoryStreams:
    """Both sides of the seam. Use one instance in one event loop."""

    def __init__(
        self,
        *,
        lease_s: float = LEASE_S,
        max_deliveries: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` ages leases and heartbeats of replicas; waiting is always real."""
        self._lease_s = lease_s
        self._max_deliveries = max_deliveries
        self._clock = clock
        self._entry_ids = itertools.count(1)
        self._tickets: dict[str, _OpenTicket] = {}
        self._groups: dict[str, _Group] = {}
        self._issued: set[str] = set()
        self._finished: dict[str, str] = {}
        self._settled: dict[str, float] = {}
        """Acked groups by the time of their ack: soon to be forgotten."""
        self._withdrawn: list[str] = []
        self._dead: list[DeadLetter] = []
        self._doubled = 0
        self._replicas: dict[str, tuple[float, ReplicaStatus]] = {}

    # -- producers --------------------------------------------------------------------------------

    async def claim(self, consumer: str, *, timeout_s: float) -> Lease | None:
        """See base.py."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            lease = self._claim_now(consumer)
            if lease is not None or time.monotonic() >= give_up_at:
                return lease
            await asyncio.sleep(_POLL_S)

    def _claim_now(self, consumer: str) -> Lease | None:
        now = self._clock()
        # Those whose lease ran out first, as on Redis.
        order = sorted(self._tickets.items(), key=lambda item: item[1].consumer is None)
        for entry_id, ticket in order:
            if ticket.consumer is not None and now - ticket.beat_at < self._lease_s:
                continue
            if ticket.deliveries >= self._max_deliveries:
                self._bury_ticket(entry_id, "delivered too often")
                continue
            ticket.consumer, ticket.beat_at = consumer, now
            ticket.deliveries += 1
            try:
                record = decode_ticket(ticket.body)
            except ProtocolError as error:
                self._bury_ticket(entry_id, str(error))
                continue
            return Lease(
                entry_id=entry_id,
                consumer=consumer,
                ticket=record,
                deliveries=ticket.deliveries,
                lasts_s=self._lease_s,
            )
        return None

    def _bury_ticket(self, entry_id: str, reason: str) -> None:
        self._bury(self._tickets.pop(entry_id).ticket_id, reason)

    def _bury(self, named: str, reason: str) -> None:
        self._dead.append(DeadLetter(entry_id=self._next_entry_id(), id=named, reason=reason))

    async def heartbeat(self, lease: Lease) -> None:
        """See base.py."""
        self._held(lease).beat_at = self._clock()

    async def finish(self, lease: Lease, group: RolloutGroup, *, idempotency_key: str = "") -> bool:
        """See base.py."""
        check_belongs(lease.ticket.ticket_id, group)
        body = encode_group(group)
        key = idempotency_key or uuid.uuid4().hex
        known = self._finished.get(group.group_id)
        if known == key:
            return True
        if known is None:
            if lease.entry_id not in self._tickets:
                raise not_open(group)
            self._groups[self._next_entry_id()] = _Group(group_id=group.group_id, body=body)
            self._finished[group.group_id] = key
        else:
            self._doubled += 1
        self._tickets.pop(lease.entry_id, None)
        return known is None

    async def give_back(self, lease: Lease, *, reason: str) -> None:
        """See base.py."""
        ticket = self._held(lease)
        ticket.consumer = "returned"
        ticket.beat_at = -float("inf")
        ticket.deliveries -= 1

    def _held(self, lease: Lease) -> _OpenTicket:
        ticket = self._tickets.get(lease.entry_id)
        if ticket is None or ticket.consumer != lease.consumer:
            raise not_leased(lease)
        return ticket

    async def register(self, status: ReplicaStatus, *, ttl_s: float) -> None:
        """See base.py."""
        self._replicas[status.replica_id] = (self._clock() + ttl_s, status)

    # -- trainer ----------------------------------------------------------------------------------

    async def issue(self, tickets: Many[Ticket]) -> None:
        """See base.py."""
        for ticket in tickets:
            if ticket.ticket_id not in self._issued:
                self._issued.add(ticket.ticket_id)
                self._tickets[self._next_entry_id()] = _OpenTicket(
                    ticket_id=ticket.ticket_id, body=encode_ticket(ticket)
                )

    async def read(self, *, limit: int, timeout_s: float) -> list[DeliveredGroup]:
        """See base.py."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            groups = self._read_now(limit)
            if groups or time.monotonic() >= give_up_at:
                return groups
            await asyncio.sleep(_POLL_S)

    def _read_now(self, limit: int) -> list[DeliveredGroup]:
        waiting = [entry_id for entry_id, group in self._groups.items() if not group.delivered]
        groups = []
        for entry_id in waiting[:limit]:
            self._groups[entry_id].delivered = True
            try:
                group = decode_group(self._groups[entry_id].body)
            except ProtocolError as error:
                self._bury_group(entry_id, str(error))
                continue
            groups.append(DeliveredGroup(entry_id=entry_id, group=group))
        return groups

    def _bury_group(self, entry_id: str, reason: str) -> None:
        group = self._groups.pop(entry_id, None)
        if group is not None:
            self._bury(group.group_id, reason)

    async def ack(self, entry_ids: Many[str]) -> None:
        """See base.py."""
        now = self._clock()
        for entry_id in entry_ids:
            group = self._groups.pop(entry_id, None)
            if group is not None:
                self._settled[group.group_id] = now
        for group_id in [g for g, at in self._settled.items() if now - at > REMEMBERS_S]:
            del self._settled[group_id]
            self._issued.discard(group_id)
            self._finished.pop(group_id, None)

    async def dead_letter(self, delivered: DeliveredGroup, *, reason: str) -> None:
        """See base.py."""
        self._bury_group(delivered.entry_id, reason)

    async def dead_letters(self, *, after: str = "", limit: int = 256) -> list[DeadLetter]:
        """See base.py."""
        place = [letter.entry_id for letter in self._dead].index(after) + 1 if after else 0
        return self._dead[place : place + limit]

    async def cancel_open(self) -> list[str]:
        """See base.py."""
        self._withdrawn += [ticket.ticket_id for ticket in self._tickets.values()]
        self._tickets.clear()
        return list(self._withdrawn)

    async def depth(self) -> Depth:
        """See base.py."""
        pending = sum(group.delivered for group in self._groups.values())
        return Depth(
            tickets_open=len(self._tickets),
            groups_unread=len(self._groups) - pending,
            groups_pending=pending,
            dead=len(self._dead),
            doubled=self._doubled,
            dead_reasons=dict(Counter(counted_reason(letter.reason) for letter in self._dead)),
        )

    async def replicas(self) -> list[ReplicaStatus]:
        """See base.py."""
        now = self._clock()
        return [status for until, status in self._replicas.values() if until > now]

    async def close(self) -> None:
        """Nothing to let go of; what the streams hold stays."""

    def _next_entry_id(self) -> str:
        return f"{next(self._entry_ids)}-0"
