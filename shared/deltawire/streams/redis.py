"""Streams on Redis: consumer groups, leases by idle time, one transaction per promise.

A lease is an entry in the pending list of the producers' group: heartbeats keep its idle time low,
and an entry that sat idle for `lease_s` may be claimed by anybody. Every call repeats itself with
back-off while Redis restarts, loads, fails over or is out of memory, and raises StreamUnavailable
only after `patience_s`. That is safe because each transaction (see scripts.py) is harmless when it
runs twice, and because what a lost reply delivered is delivered again.
"""

import asyncio
import itertools
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Many
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from redis import exceptions as redis_errors

from deltawire.protocol import topics
from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import ProtocolError, StreamError, StreamUnavailable
from deltawire.protocol.rollouts import ROLLOUT_SCHEMA, RolloutGroup, Ticket
from deltawire.streams import scripts
from deltawire.streams.backoff import backoff_s
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
    check_schema,
    decode_ticket,
    decoded,
    encode_ticket,
    encoded,
)
from deltawire.streams.redis_client import RedisClient, close_client

T = TypeVar("T")

TRAINER_CONSUMER = "trainer"
"""One name for every trainer process of a run, so that a new one inherits what was not acked."""
BLOCK_S = 1.0
"""Longest single wait inside Redis; leases that ran out are looked for in between."""
_ANSWER_S = 11.0
"""Longest silence before a call is given up: a cut cable must not hang a producer. No wait inside
Redis is as long."""
DEAD_LETTERS_KEPT = 1000
"""The newest ones, to look at. Their counters are kept for ever."""
_LONG_IDLE_MS = 7 * 24 * 3600 * 1000

_PASSING_REPLY = re.compile(
    r"\b(LOADING|BUSY|OOM|used memory|READONLY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN"
    r"|MISCONF)\b"
)
"""Error replies that a healthy server stops giving by itself."""

_NO_CLUSTER = "Cluster mode is not enabled"
"""What redis-py says, in an error it also has for a cluster that cannot be reached now."""

log = logging.getLogger(__name__)


class RedisStreams:
    """Both sides of the seam. Use one instance in one event loop."""

    def __init__(
        self,
        client: RedisClient,
        *,
        run_id: str,
        lease_s: float = LEASE_S,
        max_deliveries: int = 4,
        patience_s: float = 30.0,
        remembers_s: float = REMEMBERS_S,
    ) -> None:
        """`remembers_s`: how long the id of an acked group is still known."""
        self._redis = client
        self._run_id = run_id
        self._tickets = topics.tickets_stream(run_id)
        self._groups = topics.groups_stream(run_id)
        self._dead = topics.dead_letters_stream(run_id)
        self._counters = topics.counters_key(run_id)
        self._lease_ms = int(lease_s * 1000)
        self._remembers_ms = int(remembers_s * 1000)
        self._max_deliveries = max_deliveries
        self._patience_s = patience_s
        self._has_groups = False
        self._recovery_cursor: str | None = "0-0"
        """Where the first reading of unacked groups stands; None when it is through."""
        self._keys = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._handed_out: dict[str, str] = {}
        """Groups given to this process and not acked, never given twice: entry id -> group id."""

    # -- producers --------------------------------------------------------------------------------

    async def claim(self, consumer: str, *, timeout_s: float) -> Lease | None:
        """See base.py. A ticket that cannot be read, or that outlived its producers too often, goes
        to the dead letters on the way."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            lease = await self._claim_now(consumer)
            wait_s = min(BLOCK_S, give_up_at - time.monotonic())
            if lease is None and wait_s > 0.0:
                lease = await self._claim_next(consumer, wait_s=wait_s)
            if lease is not None or time.monotonic() >= give_up_at:
                return lease

    async def _claim_now(self, consumer: str) -> Lease | None:
        reply = await self._script(
            scripts.CLAIM,
            [self._tickets, self._dead, self._counters],
            [
                topics.CONSUMER_GROUP_PRODUCERS, consumer, self._lease_ms, self._max_deliveries,
                "delivered too often", DEAD_LETTERS_KEPT,
            ],
        )  # fmt: skip
        if not reply:
            return None
        entry_id, deliveries, flat = cast("tuple[bytes, int, list[bytes]]", reply)
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        return await self._leased(consumer, entry_id.decode(), fields, deliveries)

    async def _claim_next(self, consumer: str, *, wait_s: float) -> Lease | None:
        """Wait for a fresh ticket."""
        entries = await self._read_group(
            topics.CONSUMER_GROUP_PRODUCERS, consumer, self._tickets, ">", limit=1, wait_s=wait_s
        )
        if not entries:
            return None
        entry_id, fields = entries[0]
        return await self._leased(consumer, entry_id, fields, 1)

    async def _leased(
        self, consumer: str, entry_id: str, fields: Mapping[bytes, bytes], deliveries: int
    ) -> Lease | None:
        try:
            ticket = decode_ticket(_body(fields))
        except ProtocolError as error:
            await self._bury(self._tickets, topics.CONSUMER_GROUP_PRODUCERS, entry_id, str(error))
            return None
        return Lease(
            entry_id=entry_id,
            consumer=consumer,
            ticket=ticket,
            deliveries=deliveries,
            lasts_s=self._lease_ms / 1000,
        )

    async def heartbeat(self, lease: Lease) -> None:
        """See base.py."""
        kept = await self._script(
            scripts.HEARTBEAT,
            [self._tickets],
            [topics.CONSUMER_GROUP_PRODUCERS, lease.consumer, lease.entry_id],
        )
        if not kept:
            raise not_leased(lease)

    async def finish(self, lease: Lease, group: RolloutGroup, *, idempotency_key: str = "") -> bool:
        """See base.py."""
        check_belongs(lease.ticket.ticket_id, group)
        body = await encoded(group)
        outcome = await self._script(
            scripts.FINISH,
            [
                self._tickets, self._groups, topics.finished_key(self._run_id), self._counters,
            ],
            [
                topics.CONSUMER_GROUP_PRODUCERS, lease.entry_id, group.group_id,
                idempotency_key or next(self._keys), ROLLOUT_SCHEMA, body,
            ],
        )  # fmt: skip
        if outcome == -1:
            raise not_open(group)
        return outcome == 1

    async def give_back(self, lease: Lease, *, reason: str) -> None:
        """See base.py. A delivery given back does not count towards the dead letters."""
        kept = await self._script(
            scripts.GIVE_BACK,
            [self._tickets],
            [topics.CONSUMER_GROUP_PRODUCERS, lease.consumer, lease.entry_id, _LONG_IDLE_MS],
        )
        if not kept:
            raise not_leased(lease)
        log.info("ticket given back", extra={"ticket": lease.ticket.ticket_id, "reason": reason})

    async def register(self, status: ReplicaStatus, *, ttl_s: float) -> None:
        """See base.py."""
        await self._script(
            scripts.REGISTER,
            [
                topics.replicas_key(self._run_id, status.replica_id),
                topics.replica_index_key(self._run_id),
            ],
            [status.replica_id, status.model_dump_json(), int(ttl_s * 1000)],
        )

    # -- trainer ----------------------------------------------------------------------------------

    async def issue(self, tickets: Many[Ticket]) -> None:
        """See base.py."""
        if not tickets:
            return
        pairs: list[bytes | str | int] = []
        for ticket in tickets:
            pairs += [ticket.ticket_id, encode_ticket(ticket)]
        await self._script(
            scripts.ISSUE,
            [self._tickets, topics.issued_key(self._run_id)],
            [ROLLOUT_SCHEMA, *pairs],
        )

    async def read(self, *, limit: int, timeout_s: float) -> list[DeliveredGroup]:
        """See base.py. Entries that cannot be read go to the dead letters on the way."""
        give_up_at = time.monotonic() + timeout_s
        try:
            while True:
                groups = await self._read_unacked(limit)
                if not groups and self._recovery_cursor is None:
                    wait_s = min(BLOCK_S, max(0.0, give_up_at - time.monotonic()))
                    groups = await self._read_groups(">", limit=limit, wait_s=wait_s)
                if groups or (self._recovery_cursor is None and time.monotonic() >= give_up_at):
                    break
        except asyncio.CancelledError:
            # What was on its way to us is pending now: the next call must look there.
            self._recovery_cursor = "0-0"
            raise
        self._handed_out.update({d.entry_id: d.group.group_id for d in groups})
        return groups

    async def _read_unacked(self, limit: int) -> list[DeliveredGroup]:
        """The next part of what was delivered and never acked; nothing once that is through."""
        cursor = self._recovery_cursor
        if cursor is None:
            return []
        self._recovery_cursor = None
        return await self._read_groups(cursor, limit=limit, wait_s=0.0)

    async def _read_groups(self, after: str, *, limit: int, wait_s: float) -> list[DeliveredGroup]:
        entries = await self._read_group(
            topics.CONSUMER_GROUP_TRAINER,
            TRAINER_CONSUMER,
            self._groups,
            after,
            limit=limit,
            wait_s=wait_s,
        )
        if after == ">":
            return await self._delivered(entries, redelivered=False)
        if entries:
            self._recovery_cursor = entries[-1][0]
        unseen = [entry for entry in entries if entry[0] not in self._handed_out]
        return await self._delivered(unseen, redelivered=True)

    async def _delivered(
        self, entries: list[tuple[str, dict[bytes, bytes]]], *, redelivered: bool
    ) -> list[DeliveredGroup]:
        groups = []
        for entry_id, fields in entries:
            try:
                group = await decoded(_body(fields))
            except ProtocolError as error:
                await self._bury(self._groups, topics.CONSUMER_GROUP_TRAINER, entry_id, str(error))
                continue
            groups.append(DeliveredGroup(entry_id=entry_id, group=group, redelivered=redelivered))
        return groups

    async def ack(self, entry_ids: Many[str]) -> None:
        """See base.py. Acked entries are freed."""
        if not entry_ids:
            return
        pairs: list[bytes | str | int] = []
        for entry_id in entry_ids:
            pairs += [entry_id, self._handed_out.get(entry_id, "")]
        await self._script(
            scripts.ACK,
            [
                self._groups, topics.issued_key(self._run_id), topics.finished_key(self._run_id),
                topics.settled_key(self._run_id),
            ],
            [topics.CONSUMER_GROUP_TRAINER, self._remembers_ms, *pairs],
        )  # fmt: skip
        for entry_id in entry_ids:
            self._handed_out.pop(entry_id, None)

    async def dead_letter(self, delivered: DeliveredGroup, *, reason: str) -> None:
        """See base.py."""
        await self._bury(self._groups, topics.CONSUMER_GROUP_TRAINER, delivered.entry_id, reason)
        self._handed_out.pop(delivered.entry_id, None)

    async def dead_letters(self, *, after: str = "", limit: int = 256) -> list[DeadLetter]:
        """See base.py."""
        reply = await self._script(scripts.DEAD_LETTERS, [self._dead], [after or "0-0", limit])
        return [
            DeadLetter(
                entry_id=entry_id.decode(),
                id=named.decode(errors="replace"),
                reason=reason.decode(errors="replace"),
            )
            for entry_id, named, reason in cast("list[tuple[bytes, bytes, bytes]]", reply)
        ]

    async def cancel_open(self) -> list[str]:
        """See base.py."""
        reply = await self._script(
            scripts.CANCEL_OPEN,
            [self._tickets, topics.withdrawn_key(self._run_id)],
            [topics.CONSUMER_GROUP_PRODUCERS],
        )
        return [ticket_id.decode() for ticket_id in cast("list[bytes]", reply)]

    async def depth(self) -> Depth:
        """See base.py."""
        reply = await self._script(
            scripts.DEPTH,
            [self._tickets, self._groups, self._counters],
            [topics.CONSUMER_GROUP_TRAINER],
        )
        tickets, groups, pending, flat = cast("tuple[int, int, int, list[bytes]]", reply)
        counters = {
            name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)
        }
        return Depth(
            tickets_open=tickets,
            groups_unread=groups - pending,
            groups_pending=pending,
            dead=counters.get("dead", 0),
            doubled=counters.get("doubled", 0),
            dead_reasons={
                name.removeprefix("dead:"): count
                for name, count in counters.items()
                if name.startswith("dead:")
            },
        )

    async def replicas(self) -> list[ReplicaStatus]:
        """See base.py."""
        ids = cast(
            "list[bytes]",
            await self._script(scripts.LIVE_REPLICAS, [topics.replica_index_key(self._run_id)], []),
        )
        keys = [topics.replicas_key(self._run_id, replica_id.decode()) for replica_id in ids]
        if not keys:
            return []
        bodies = cast("list[bytes | None]", await self._repeat(lambda: self._redis.mget(keys)))
        statuses = (_replica_status(body) for body in bodies if body is not None)
        return [status for status in statuses if status is not None]

    async def close(self) -> None:
        """See base.py."""
        await close_client(self._redis)

    # -- the border to redis-py -------------------------------------------------------------------

    async def _bury(self, stream: str, group: str, entry_id: str, reason: str) -> None:
        await self._script(
            scripts.BURY,
            [stream, self._dead, self._counters],
            [group, entry_id, reason[:1000], counted_reason(reason), DEAD_LETTERS_KEPT],
        )
        log.warning("entry dead-lettered", extra={"entry": entry_id, "reason": reason})

    async def _script(
        self, script: str, keys: list[str], arguments: list[bytes | str | int]
    ) -> object:
        async def call() -> object:
            # Scripts are short: sent whole, they need no reloading after a restart or failover.
            return await cast(
                "Awaitable[object]",
                self._redis.eval(script, len(keys), *keys, *cast("list[str]", arguments)),
            )

        return await self._repeat(call)

    async def _read_group(
        self, group: str, consumer: str, stream: str, after: str, *, limit: int, wait_s: float
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        """Entries of one stream; `after` is ">" for new ones, else an id among the pending."""

        async def call() -> object:
            return await self._redis.xreadgroup(
                group,
                consumer,
                {stream: after},
                count=limit,
                block=max(1, int(wait_s * 1000)) if after == ">" else None,
            )

        reply = cast("list[tuple[bytes, list[tuple[bytes, Any]]]]", await self._repeat(call))
        entries = reply[0][1] if reply else []
        return [(entry_id.decode(), fields or {}) for entry_id, fields in entries]

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call until Redis answers, for `patience_s` at most."""
        give_up_at = time.monotonic() + self._patience_s
        attempt = 0
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    if not self._has_groups:
                        await self._create_groups()
                    return await call()
            except (
                redis_errors.RedisError,
                redis_errors.RedisClusterException,
                TimeoutError,
            ) as error:
                self._recover_from(error)
                wait_s = backoff_s(attempt)
                if time.monotonic() + wait_s > give_up_at:
                    reason = str(error) or "silence"
                    raise StreamUnavailable(
                        f"Redis did not answer for {self._patience_s:.0f} s: {reason}"
                    ) from error
                attempt += 1
                await asyncio.sleep(wait_s)

    def _recover_from(
        self, error: redis_errors.RedisError | redis_errors.RedisClusterException | TimeoutError
    ) -> None:
        """Note what has to be done again before the next try; re-raise what will not pass."""
        if isinstance(error, redis_errors.AuthenticationError | redis_errors.NoPermissionError):
            raise StreamError(f"Redis refused our credentials: {error}") from error
        if "NOGROUP" in str(error):
            self._has_groups = False
            return
        passing = isinstance(
            error,
            TimeoutError
            | redis_errors.ConnectionError
            | redis_errors.TimeoutError
            | redis_errors.ClusterDownError
            | redis_errors.ReadOnlyError
            | redis_errors.RedisClusterException,
        ) or _PASSING_REPLY.search(str(error))
        if not passing or _NO_CLUSTER in str(error):
            raise StreamError(f"Redis answered: {error}") from error
        # The lost reply may have carried groups: read what is pending again.
        self._recovery_cursor = "0-0"

    async def _create_groups(self) -> None:
        for stream, group in (
            (self._tickets, topics.CONSUMER_GROUP_PRODUCERS),
            (self._groups, topics.CONSUMER_GROUP_TRAINER),
        ):
            try:
                await self._redis.xgroup_create(stream, group, id="0", mkstream=True)
            except redis_errors.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        self._has_groups = True


def _body(fields: Mapping[bytes, bytes]) -> bytes:
    """The body of an entry whose schema number we know. Raises ProtocolError."""
    number = fields.get(topics.ENTRY_SCHEMA_FIELD.encode(), b"")
    check_schema(int(number) if number.isdigit() else number)
    return fields.get(topics.ENTRY_BODY_FIELD.encode(), b"")


def _replica_status(body: bytes) -> ReplicaStatus | None:
    try:
        return ReplicaStatus.model_validate_json(body)
    except ValidationError as error:
        log.warning("replica heartbeat ignored", extra={"reason": str(error)})
        return None
