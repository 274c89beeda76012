"""The streams seam: tickets out to producers, finished groups back to the trainer, exactly once.

Life of a ticket: issued -> leased (claimed by one producer, kept by heartbeats) -> finished (its
group is appended and the ticket acked in one transaction), or given back, or reclaimed by idle time
when its producer died, or dead-lettered after too many deliveries.
Life of a group: appended -> delivered to the trainer -> acked once a checkpoint contains it; what
was delivered but not acked comes first after a restart.
Implementations: redis, memory (the same encoded bytes), gateway (HTTPS to the trainer). All calls
are async and raise only StreamError and ProtocolError children.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import LeaseLost
from deltawire.protocol.rollouts import RolloutGroup, Ticket

REMEMBERS_S = 3600.0
"""How long the id of an acked group is still known: longer than anybody repeats a call."""
LEASE_S = 45.0
"""How long a lease lasts unless the streams' URI says otherwise (`?lease_s=`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A claimed ticket. Heartbeat it while the episodes run."""

    entry_id: str
    consumer: str
    ticket: Ticket
    deliveries: int = 1
    lasts_s: float = LEASE_S
    """Without a heartbeat for so long, the ticket is anybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredGroup:
    """A finished group and the entry to ack."""

    entry_id: str
    group: RolloutGroup
    redelivered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much is under way: the terms of back-pressure."""

    tickets_open: int
    """Issued and not finished: waiting or leased."""
    groups_unread: int
    """Appended and not yet delivered to the trainer."""
    groups_pending: int
    """Delivered to the trainer and not yet acked."""
    dead: int = 0
    doubled: int = 0
    """Groups refused because the same id had been appended before."""
    dead_reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An entry that was set aside."""

    entry_id: str
    """Its place among the dead letters, in order of burial."""
    id: str
    """Of the ticket or group; empty when the entry named none."""
    reason: str


def counted_reason(reason: str) -> str:
    """The words under which a dead letter is counted: those before the first colon."""
    return reason.partition(":")[0][:80]


def not_leased(lease: Lease) -> LeaseLost:
    """What a producer hears that went silent for too long."""
    return LeaseLost(f"ticket {lease.ticket.ticket_id} is not leased to {lease.consumer}")


def not_open(group: RolloutGroup) -> LeaseLost:
    """What a producer hears whose ticket was withdrawn."""
    return LeaseLost(f"ticket {group.group_id} is not open any more; its group is dropped")


class ProducerStreams(Protocol):
    """What a producer needs."""

    async def claim(self, consumer: str, *, timeout_s: float) -> Lease | None:
        """The next ticket: a fresh one, or one whose producer went silent. None after timeout."""
        ...

    async def heartbeat(self, lease: Lease) -> None:
        """Keep a lease. LeaseLost when it was claimed by somebody else."""
        ...

    async def finish(self, lease: Lease, group: RolloutGroup, *, idempotency_key: str = "") -> bool:
        """Append the group and ack the ticket in one transaction. False: it was there already.

        A repeated call with the same key (default: a new one) is the same call: it answers as the
        first did and counts nothing. LeaseLost when the ticket was withdrawn; PayloadTooLarge.
        """
        ...

    async def give_back(self, lease: Lease, *, reason: str) -> None:
        """Return a ticket at once, for another producer (drain, shutdown, dead engine).

        LeaseLost when it was claimed by somebody else. Does not count as a delivery.
        """
        ...

    async def register(self, status: ReplicaStatus, *, ttl_s: float) -> None:
        """Heartbeat of a replica; it is forgotten after `ttl_s` without one."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class TrainerStreams(Protocol):
    """What the trainer needs."""

    async def issue(self, tickets: Sequence[Ticket]) -> None:
        """Append tickets. Issuing the same ticket id twice adds it once."""
        ...

    async def read(self, *, limit: int, timeout_s: float) -> list[DeliveredGroup]:
        """Groups in order of arrival; first those delivered earlier and never acked."""
        ...

    async def ack(self, entry_ids: Sequence[str]) -> None:
        """A checkpoint contains these groups (or they were dropped on purpose)."""
        ...

    async def dead_letter(self, delivered: DeliveredGroup, *, reason: str) -> None:
        """Set a group aside with a reason, and ack it."""
        ...

    async def dead_letters(self, *, after: str = "", limit: int = 256) -> list[DeadLetter]:
        """What was set aside by anybody, oldest first, from behind the entry `after`. Only the
        newest thousand or so are kept."""
        ...

    async def cancel_open(self) -> list[str]:
        """Withdraw every open ticket (end of run). Returns the ids of all that were ever withdrawn,
        so that a trainer which did not hear them may ask again."""
        ...

    async def depth(self) -> Depth:
        """How much is under way."""
        ...

    async def replicas(self) -> list[ReplicaStatus]:
        """Replicas with a live heartbeat."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
