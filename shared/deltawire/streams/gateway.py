"""The producers' side of the streams over HTTPS: for a Space, which may dial 80, 443 and 8080 only.

Speaks to the trainer's `/streams/*` face; records travel as the very bytes that lie on Redis. A
sleeping or restarting trainer (no connection, 5xx, an HTML page) is waited for with back-off; a
group carries an idempotency key, so that a repeated upload is the same upload.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping

import httpx
from pydantic import BaseModel, SecretStr, ValidationError

from deltawire.protocol.control import (
    STREAMS,
    TOKEN_HEADER,
    ClaimRequest,
    FinishReceipt,
    LeaseRef,
    Problem,
    ReplicaHeartbeat,
    ReplicaStatus,
)
from deltawire.protocol.errors import (
    LeaseLost,
    MalformedMessage,
    PayloadTooLarge,
    ProtocolError,
    SettingsError,
    StreamError,
    StreamUnavailable,
    UnknownSchema,
)
from deltawire.protocol.rollouts import RolloutGroup
from deltawire.streams.backoff import backoff_s
from deltawire.streams.base import LEASE_S, Lease
from deltawire.streams.records import check_belongs, decode_ticket, encoded

ENTRY_HEADER = "X-Deltawire-Entry"
DELIVERIES_HEADER = "X-Deltawire-Deliveries"
LEASE_HEADER = "X-Deltawire-Lease-S"
CONSUMER_HEADER = "X-Deltawire-Consumer"
TICKET_HEADER = "X-Deltawire-Ticket"
IDEMPOTENCY_HEADER = "Idempotency-Key"
RECORD_TYPE = "application/vnd.deltawire.record"

LONGEST_POLL_S = 20.0
"""Of one claim request; proxies cut silent connections after a minute or less."""
_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 120.0

_MESSAGES: dict[str, type[StreamError] | type[ProtocolError]] = {
    kind.__name__: kind for kind in (LeaseLost, PayloadTooLarge, StreamError, UnknownSchema)
}


class GatewayStreams:
    """ProducerStreams through a trainer's HTTPS face. SettingsError for an address that is none."""

    def __init__(
        self,
        url: str,
        *,
        token: SecretStr | str | None = None,
        patience_s: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        secret = token.get_secret_value() if isinstance(token, SecretStr) else token
        headers = {"Authorization": f"Bearer {secret}", TOKEN_HEADER: secret} if secret else {}
        self._patience_s = patience_s
        try:
            self._http = httpx.AsyncClient(
                base_url=url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S, transport=transport
            )
        except httpx.InvalidURL as error:
            raise SettingsError(f"streams at {url!r}: {error}") from error

    async def claim(self, consumer: str, *, timeout_s: float) -> Lease | None:
        """See base.py. Asks again until the time is up, one long poll after another."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            poll_s = min(LONGEST_POLL_S, max(0.0, give_up_at - time.monotonic()))
            response = await self._post("/claim", ClaimRequest(consumer=consumer, timeout_s=poll_s))
            if response.status_code == httpx.codes.OK:
                return _lease(consumer, response)
            if time.monotonic() >= give_up_at:
                return None

    async def heartbeat(self, lease: Lease) -> None:
        """See base.py."""
        await self._post("/heartbeat", _reference(lease))

    async def finish(self, lease: Lease, group: RolloutGroup, *, idempotency_key: str = "") -> bool:
        """See base.py."""
        check_belongs(lease.ticket.ticket_id, group)
        response = await self._send(
            "/finish",
            content=await encoded(group),
            headers={
                ENTRY_HEADER: lease.entry_id,
                CONSUMER_HEADER: lease.consumer,
                TICKET_HEADER: lease.ticket.ticket_id,
                IDEMPOTENCY_HEADER: idempotency_key or uuid.uuid4().hex,
                "Content-Type": RECORD_TYPE,
            },
            timeout_s=_UPLOAD_TIMEOUT_S,
        )
        try:
            return FinishReceipt.model_validate_json(response.content).added
        except ValidationError as error:
            raise MalformedMessage(f"not a receipt: {error}", raw=response.content) from error

    async def give_back(self, lease: Lease, *, reason: str) -> None:
        """See base.py."""
        await self._post("/give_back", _reference(lease, reason=reason[:512]))

    async def register(self, status: ReplicaStatus, *, ttl_s: float) -> None:
        """See base.py."""
        await self._post("/register", ReplicaHeartbeat(status=status, ttl_s=ttl_s))

    async def close(self) -> None:
        """See base.py."""
        await self._http.aclose()

    async def _post(self, path: str, body: BaseModel) -> httpx.Response:
        return await self._send(
            path,
            content=body.model_dump_json().encode(),
            headers={"Content-Type": "application/json"},
            timeout_s=_TIMEOUT_S,
        )

    async def _send(
        self, path: str, *, content: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> httpx.Response:
        """POST until the trainer answers, for `patience_s` at most."""
        give_up_at = time.monotonic() + self._patience_s
        attempt = 0
        while True:
            silence = "no answer"
            try:
                response = await self._http.post(
                    STREAMS + path, content=content, headers=dict(headers), timeout=timeout_s
                )
                if not _wakes_up(response):
                    return _checked(response)
                silence = f"answers {response.status_code}, waking up"
            except httpx.RequestError as error:
                silence = f"{type(error).__name__}: {error}"
            wait_s = backoff_s(attempt, first_s=0.2)
            if time.monotonic() + wait_s > give_up_at:
                raise StreamUnavailable(
                    f"{self._http.base_url}{STREAMS}{path} for {self._patience_s:.0f} s: {silence}"
                )
            attempt += 1
            await asyncio.sleep(wait_s)


def _wakes_up(response: httpx.Response) -> bool:
    """A Space that sleeps, builds or restarts answers 5xx, or a page for people."""
    html = response.headers.get("Content-Type", "").startswith("text/html")
    return response.status_code >= 500 or response.status_code == 429 or html


def _checked(response: httpx.Response) -> httpx.Response:
    """The response, when it is a success. Raises what the trainer's problem names."""
    if response.is_success:
        return response
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        problem = Problem(
            type="StreamError", title="", status=response.status_code, detail=response.text[:300]
        )
    if problem.type == "MalformedMessage":
        raise MalformedMessage(problem.detail)
    kind = _MESSAGES.get(problem.type, StreamError)
    raise kind(f"the trainer answered {response.status_code}: {problem.detail}")


def _lease(consumer: str, response: httpx.Response) -> Lease:
    try:
        return Lease(
            entry_id=response.headers[ENTRY_HEADER],
            consumer=consumer,
            ticket=decode_ticket(response.content),
            deliveries=int(response.headers[DELIVERIES_HEADER]),
            lasts_s=float(response.headers.get(LEASE_HEADER, LEASE_S)),
        )
    except (KeyError, ValueError) as error:
        raise MalformedMessage(
            f"a claimed ticket without its entry: {error}", raw=response.content
        ) from error


def _reference(lease: Lease, *, reason: str = "") -> LeaseRef:
    return LeaseRef(
        entry_id=lease.entry_id,
        consumer=lease.consumer,
        ticket_id=lease.ticket.ticket_id,
        reason=reason,
    )
