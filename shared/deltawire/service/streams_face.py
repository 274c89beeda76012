"""The trainer's HTTPS face of the streams: what a producer needs, for one that cannot reach Redis.

Only the producers' verbs are here: nobody outside can read, ack or cancel. Long polls are short
enough for proxies, uploads are bounded while they arrive, and a group is judged as a record before
it comes near the stream. Auth is the app's.
"""

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response, status

from deltawire.protocol.control import (
    ENTRY_ID,
    STREAMS,
    ClaimRequest,
    FinishReceipt,
    LeaseRef,
    ReplicaHeartbeat,
)
from deltawire.protocol.errors import PayloadTooLarge
from deltawire.protocol.rollouts import Task, Ticket
from deltawire.streams.base import Lease, ProducerStreams
from deltawire.streams.gateway import (
    CONSUMER_HEADER,
    DELIVERIES_HEADER,
    ENTRY_HEADER,
    IDEMPOTENCY_HEADER,
    LEASE_HEADER,
    LONGEST_POLL_S,
    RECORD_TYPE,
    TICKET_HEADER,
)
from deltawire.streams.records import MAX_RECORD_BYTES, decoded, encode_ticket


def create_streams_router(streams: ProducerStreams) -> APIRouter:
    """Routes below /streams over any backend. Errors are answered as problems by the app."""
    router = APIRouter(prefix=STREAMS, tags=["streams"])

    @router.post("/claim", responses={204: {"description": "no ticket now"}})
    async def claim(body: ClaimRequest) -> Response:
        """Lease the next ticket; 204 when there was none in time."""
        timeout_s = min(body.timeout_s, LONGEST_POLL_S)
        lease = await streams.claim(body.consumer, timeout_s=timeout_s)
        if lease is None:
            return Response(status_code=status.HTTP_204_NO_CONTENT)
        return Response(
            encode_ticket(lease.ticket),
            media_type=RECORD_TYPE,
            headers={
                ENTRY_HEADER: lease.entry_id,
                DELIVERIES_HEADER: str(lease.deliveries),
                LEASE_HEADER: str(lease.lasts_s),
            },
        )

    @router.post("/heartbeat", status_code=status.HTTP_204_NO_CONTENT)
    async def heartbeat(body: LeaseRef) -> None:
        """Keep a lease; 409 when it is lost."""
        await streams.heartbeat(_lease(body))

    @router.post("/give_back", status_code=status.HTTP_204_NO_CONTENT)
    async def give_back(body: LeaseRef) -> None:
        """Return a ticket; 409 when the lease is lost."""
        await streams.give_back(_lease(body), reason=body.reason)

    @router.post("/finish")
    async def finish(
        request: Request,
        entry_id: Annotated[str, Header(alias=ENTRY_HEADER, pattern=ENTRY_ID)],
        consumer: Annotated[str, Header(alias=CONSUMER_HEADER, max_length=128)],
        ticket_id: Annotated[str, Header(alias=TICKET_HEADER, max_length=256)],
        idempotency_key: Annotated[str, Header(alias=IDEMPOTENCY_HEADER, max_length=128)],
    ) -> FinishReceipt:
        """Append a group (a record as the body) and ack its ticket; repeatable with one key."""
        group = await decoded(await _bounded_body(request))
        lease = _lease(LeaseRef(entry_id=entry_id, consumer=consumer, ticket_id=ticket_id))
        added = await streams.finish(lease, group, idempotency_key=idempotency_key)
        return FinishReceipt(added=added)

    @router.post("/register", status_code=status.HTTP_204_NO_CONTENT)
    async def register(body: ReplicaHeartbeat) -> None:
        """Heartbeat of a replica."""
        await streams.register(body.status, ttl_s=body.ttl_s)

    return router


def _lease(reference: LeaseRef) -> Lease:
    """A lease is known by its entry and consumer; of its ticket only the id is looked at."""
    return Lease(
        entry_id=reference.entry_id,
        consumer=reference.consumer,
        ticket=Ticket(ticket_id=reference.ticket_id, task=Task(), group_size=1),
    )


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_RECORD_BYTES:
            raise PayloadTooLarge(f"a record of more than {MAX_RECORD_BYTES} bytes")
    return bytes(body)
