"""A cancelled call ends at once, at whatever point the cancellation meets it."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import pytest

from deltawire.streams.redis import RedisStreams
from deltawire.streams.redis_client import redis_client

POINTS = range(60)
"""How many turns of the event loop a call is given before it is cancelled."""


@pytest.mark.parametrize(
    "call",
    [
        lambda streams: streams.claim("p", timeout_s=60.0),
        lambda streams: streams.read(limit=1, timeout_s=60.0),
    ],
    ids=["claim", "read"],
)
async def test_a_waiting_call_can_be_cancelled_at_every_point(
    redis_server, call: Callable[[RedisStreams], Awaitable[object]]
) -> None:
    streams = RedisStreams(redis_client(redis_server.url), run_id=uuid.uuid4().hex)
    try:
        for turns in POINTS:
            task = asyncio.ensure_future(call(streams))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            ended, _ = await asyncio.wait({task}, timeout=20.0)
            assert ended, f"still pending when cancelled after {turns} turns"
            assert task.cancelled(), f"went on when cancelled after {turns} turns"
    finally:
        await streams.close()
