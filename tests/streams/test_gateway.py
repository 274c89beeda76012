"""The HTTPS side of the streams when the way to the trainer is bad."""

import httpx
import pytest
from fastapi import FastAPI

from deltawire.protocol.errors import (
    LeaseLost,
    MalformedMessage,
    PayloadTooLarge,
    SettingsError,
    StreamError,
    StreamUnavailable,
)
from deltawire.service import streams_face
from deltawire.service.problems import install_problem_handlers
from deltawire.streams.gateway import GatewayStreams
from deltawire.streams.memory import MemoryStreams
from deltawire.streams.open import open_streams


class BadWay(httpx.AsyncBaseTransport):
    """Passes requests on to the trainer's app; does to their answers what it is told."""

    def __init__(self, streams: MemoryStreams) -> None:
        app = FastAPI()
        install_problem_handlers(app)
        app.include_router(streams_face.create_streams_router(streams))
        self._app = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.instead: list[httpx.Response | Exception] = []
        """What the next callers see in place of an answer that was made."""
        self.before: list[httpx.Response | Exception] = []
        """What the next callers see without any request having arrived."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.before:
            return _or_raise(self.before.pop(0))
        answer = await self._app.handle_async_request(request)
        return _or_raise(self.instead.pop(0)) if self.instead else answer


def _or_raise(answer: httpx.Response | Exception) -> httpx.Response:
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def streams() -> MemoryStreams:
    return MemoryStreams()


@pytest.fixture
def way(streams) -> BadWay:
    return BadWay(streams)


@pytest.fixture
async def gateway(way):
    gateway = GatewayStreams("https://trainer", transport=way, patience_s=20.0)
    yield gateway
    await gateway.close()


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.Response(502),
        httpx.Response(200, html="<html>Your Space is building</html>"),
        httpx.ConnectError("asleep"),
        httpx.ReadTimeout("slow"),
        httpx.DecodingError("a packed answer, cut short by a proxy"),
    ],
)
async def test_a_waking_trainer_is_waited_for(trouble, gateway, way, streams, make_ticket):
    await streams.issue([make_ticket()])
    way.before = [trouble]
    assert (await gateway.claim("p", timeout_s=0.0)).ticket.ticket_id == "t-1"


async def test_a_group_whose_receipt_was_lost_is_one_group(
    gateway, way, streams, make_ticket, make_group
):
    await streams.issue([make_ticket()])
    lease = await gateway.claim("p", timeout_s=1.0)
    way.instead = [httpx.ReadError("cut"), httpx.Response(504)]
    assert await gateway.finish(lease, make_group()) is True
    depth = await streams.depth()
    assert (depth.groups_unread, depth.doubled) == (1, 0)


async def test_a_trainer_that_stays_away_is_unavailable(way):
    gateway = GatewayStreams("https://trainer", transport=way, patience_s=0.3)
    way.before = [httpx.ConnectError("gone")] * 50
    with pytest.raises(StreamUnavailable, match="gone"):
        await gateway.claim("p", timeout_s=0.0)
    await gateway.close()


async def test_a_refusal_is_not_repeated(gateway, way):
    way.before = [httpx.Response(401, json={"detail": "token"}), httpx.ConnectError("never asked")]
    with pytest.raises(StreamError, match="401"):
        await gateway.claim("p", timeout_s=0.0)
    assert len(way.before) == 1


async def test_an_answer_that_is_no_ticket_is_said_to_be_none(gateway, way):
    way.before = [httpx.Response(200, content=b"\x00junk")]
    with pytest.raises(MalformedMessage):
        await gateway.claim("p", timeout_s=0.0)


async def test_an_upload_is_bounded_while_it_arrives(
    gateway, streams, make_ticket, make_group, monkeypatch
):
    await streams.issue([make_ticket()])
    lease = await gateway.claim("p", timeout_s=1.0)
    monkeypatch.setattr(streams_face, "MAX_RECORD_BYTES", 100)
    with pytest.raises(PayloadTooLarge):
        await gateway.finish(lease, make_group())
    assert (await streams.depth()).tickets_open == 1


async def test_the_face_judges_a_group_before_it_comes_near_the_stream(
    way, streams, make_ticket, gateway
):
    await streams.issue([make_ticket()])
    lease = await gateway.claim("p", timeout_s=1.0)
    async with httpx.AsyncClient(transport=way, base_url="https://trainer") as http:
        answer = await http.post(
            "/streams/finish",
            content=b"\x00junk",
            headers={
                "X-Deltawire-Entry": lease.entry_id,
                "X-Deltawire-Consumer": "p",
                "X-Deltawire-Ticket": "t-1",
                "Idempotency-Key": "k",
            },
        )
        incomplete = await http.post("/streams/finish", content=b"")
    assert (answer.status_code, answer.json()["type"]) == (400, "MalformedMessage")
    assert incomplete.status_code == 422
    assert (await streams.depth()).groups_unread == 0


async def test_what_producers_need_not_do_has_no_route(way):
    async with httpx.AsyncClient(transport=way, base_url="https://trainer") as http:
        for verb in ("issue", "read", "ack", "dead_letter", "cancel_open"):
            assert (await http.post(f"/streams/{verb}", json={})).status_code == 404


async def test_a_lost_lease_is_told_apart(gateway, streams, make_ticket):
    await streams.issue([make_ticket()])
    lease = await gateway.claim("p", timeout_s=1.0)
    await streams.cancel_open()
    with pytest.raises(LeaseLost):
        await gateway.heartbeat(lease)


@pytest.mark.parametrize("url", ["https://trainer/\n", "https://ü.."])
def test_an_address_that_is_none_is_a_setting_that_is_wrong(url: str) -> None:
    with pytest.raises(SettingsError, match="streams at"):
        open_streams(url, run_id="r")
