"""No route but health answers without the token, over HTTP and over WebSocket alike."""

import ssl
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, SecretStr

from deltawire.control.client import ServiceClient
from deltawire.protocol.control import TOKEN_HEADER
from deltawire.protocol.errors import RemoteError
from deltawire.service.app import create_service_app
from deltawire.service.metrics import Metrics

TOKEN = SecretStr("right")


class Status(BaseModel):
    answer: int = 42


async def _status() -> Status:
    return Status()


def _app(token: SecretStr | None = TOKEN, reason: str = "") -> FastAPI:
    return create_service_app(
        title="test", status=_status, unready=lambda: reason, metrics=Metrics("test"), token=token
    )


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("path", ["/status", "/metrics", "/docs", "/openapi.json", "/nowhere"])
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {TOKEN_HEADER: "righ"}, {TOKEN_HEADER: ""}]
)
async def test_a_route_refuses_a_call_without_the_token(
    http: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    answer = await http.get(path, headers=headers)
    assert answer.status_code == 401
    assert "right" not in answer.text


@pytest.mark.parametrize("host", ["x/healthz?", "x/healthz#", "x/healthz\\"])
async def test_no_host_header_spells_an_open_path(http: httpx.AsyncClient, host: str) -> None:
    assert (await http.get("/status", headers={"Host": host})).status_code == 401


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer right"}, {"Authorization": "x", TOKEN_HEADER: "right"}]
)
async def test_either_header_carries_the_token(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    assert (await http.get("/status", headers=headers)).json() == {"answer": 42}


async def test_health_is_open_and_says_nothing(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).json() == {"status": "alive"}


async def test_the_client_says_why_a_service_is_not_ready() -> None:
    transport = httpx.ASGITransport(app=_app(reason="no anchor yet"))
    async with ServiceClient("http://test", token=TOKEN, transport=transport) as client:
        assert await client.unready() == "no anchor yet"


async def test_the_client_names_the_url_of_a_refused_call() -> None:
    transport = httpx.ASGITransport(app=_app())
    async with ServiceClient("http://test", transport=transport) as client:
        with pytest.raises(RemoteError, match="http://test/status answered 401"):
            await client.status(Status)


async def test_the_client_refuses_an_answer_of_another_shape() -> None:
    class Other(BaseModel):
        missing: str

    transport = httpx.ASGITransport(app=_app())
    async with ServiceClient("http://test", token=TOKEN, transport=transport) as client:
        with pytest.raises(RemoteError, match="not a Other"):
            await client.status(Other)


async def test_clients_read_the_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = ssl.create_default_context

    def counted(*arguments: object, **options: object) -> ssl.SSLContext:
        read.append(arguments)
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    for _ in range(3):
        async with ServiceClient("https://somewhere.example", token=TOKEN):
            pass
    assert len(read) <= 1
