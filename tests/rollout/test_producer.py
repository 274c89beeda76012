"""Tickets become groups, once, whatever happens in between."""

import asyncio
import contextlib

import pytest

from deltawire.protocol.errors import EngineError, VersionNotServed
from deltawire.rollout.environment import EnvironmentClient
from deltawire.rollout.producer import Producer
from deltawire.streams import records
from deltawire.streams.memory import MemoryStreams


@contextlib.asynccontextmanager
async def producing(**parts):
    """A producer at work; drained at the end."""
    producer = Producer(consumer="p1", claim_s=0.05, **parts)
    running = asyncio.create_task(producer.run(drain_s=5.0))
    try:
        yield producer
    finally:
        producer.drain()
        await running


async def only_group(streams, server, policy, renderer):
    """What a producer makes of the one ticket that was issued."""
    async with producing(
        streams=streams,
        policy=policy,
        environment=EnvironmentClient(server.url),
        renderer=renderer,
    ):
        [delivered] = await streams.read(limit=1, timeout_s=60.0)
    return delivered.group


async def test_tickets_become_groups_of_sampled_tokens(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=2)
    streams, policy = MemoryStreams(), scripted_policy(renderer, ["crane", "slate"])
    await streams.issue([make_ticket(group_size=3)])

    async with producing(
        streams=streams,
        policy=policy,
        environment=EnvironmentClient(server.url),
        renderer=renderer,
    ) as producer:
        [delivered] = await streams.read(limit=1, timeout_s=60.0)

    group = delivered.group
    assert [r.status for r in group.rollouts] == ["ok"] * 3
    assert [r.reward for r in group.rollouts] == [1.0] * 3
    assert group.rollouts[0].metrics == {"solved": 1.0, "turns": 2.0}
    assert group.producer_id == "p1"
    assert producer.counters.groups_finished == 1
    assert server.active == 0, "sessions are let go of"
    assert {r["seed"] for r in server.resets} == {7}


async def test_the_first_turn_of_a_group_is_one_request(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=2)
    streams, policy = MemoryStreams(), scripted_policy(renderer)
    await streams.issue([make_ticket(group_size=4)])
    async with producing(
        streams=streams,
        policy=policy,
        environment=EnvironmentClient(server.url),
        renderer=renderer,
    ):
        await streams.read(limit=1, timeout_s=60.0)
    assert [request.n for request in policy.requests] == [4, 1, 1, 1, 1]
    assert len({request.session for request in policy.requests}) == 4


async def test_a_group_larger_than_the_environment_still_ends(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=1, max_sessions=2)
    streams = MemoryStreams()
    await streams.issue([make_ticket(group_size=5)])
    group = await only_group(streams, server, scripted_policy(renderer), renderer)
    assert [r.status for r in group.rollouts] == ["ok"] * 5
    assert server.most_active == 2


async def test_an_environment_fault_is_a_rollout_with_its_reason(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=3)
    server.fail_on = "slate"
    streams, policy = MemoryStreams(), scripted_policy(renderer, ["crane", "slate", "grape"])
    await streams.issue([make_ticket(group_size=2)])
    group = await only_group(streams, server, policy, renderer)
    by_status = {r.status: r for r in group.rollouts}
    assert set(by_status) == {"ok", "error"}
    assert "the world broke" in by_status["error"].reason
    assert len(by_status["error"].sequences[0].turns) == 2, "what was sampled is kept"


async def test_a_group_that_facts_make_too_large_is_told_of_once(
    serve_openenv, scripted_policy, renderer, make_ticket, monkeypatch
):
    monkeypatch.setattr(records, "MAX_UNPACKED_BYTES", 20_000)
    server = await serve_openenv(turns=1)
    server.info = {"log": "x" * 30_000}
    streams = MemoryStreams()
    await streams.issue([make_ticket(group_size=2)])
    group = await only_group(streams, server, scripted_policy(renderer), renderer)
    rollouts = group.rollouts
    assert [r.status for r in rollouts] == ["error"] * 2
    assert all("at most 20000 unpacked" in r.reason and not r.info for r in rollouts)


async def test_a_hung_environment_ends_at_the_deadline_of_the_ticket(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=2)
    server.hang_on = "crane"
    streams = MemoryStreams()
    await streams.issue([make_ticket(group_size=2, deadline_s=0.3)])
    group = await only_group(streams, server, scripted_policy(renderer, ["crane"]), renderer)
    assert [r.status for r in group.rollouts] == ["error"] * 2
    assert all("deadline" in r.reason for r in group.rollouts)


async def test_max_turns_truncates(serve_openenv, scripted_policy, renderer, make_ticket):
    server = await serve_openenv(turns=9)
    streams = MemoryStreams()
    await streams.issue([make_ticket(group_size=2, max_turns=2)])
    group = await only_group(streams, server, scripted_policy(renderer), renderer)
    assert [(r.status, r.reason) for r in group.rollouts] == [("truncated", "max_turns")] * 2


async def test_a_sequence_without_room_for_an_answer_is_truncated(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=9)
    streams, policy = MemoryStreams(), scripted_policy(renderer)
    await streams.issue([make_ticket(group_size=1, max_turns=99, max_tokens=120)])
    group = await only_group(streams, server, policy, renderer)
    [rollout] = group.rollouts
    assert (rollout.status, rollout.reason) == ("truncated", "max_tokens")
    asked = [len(r.prompt_ids) + r.sampling.max_new_tokens for r in policy.requests]
    assert max(asked) <= 120


class _Unable:
    async def generate(self, request):
        raise EngineError("no weights that can be trusted")


async def test_a_producer_whose_engine_fails_gives_its_ticket_to_another(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=1)
    streams = MemoryStreams()
    environment = EnvironmentClient(server.url)
    await streams.issue([make_ticket()])
    async with producing(
        streams=streams, policy=_Unable(), environment=environment, renderer=renderer
    ) as broken:
        async with asyncio.timeout(60.0):
            while not broken.counters.groups_given_back:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        broken.pause()
        well = Producer(
            streams=streams,
            policy=scripted_policy(renderer),
            environment=environment,
            renderer=renderer,
            claim_s=0.05,
        )
        running = asyncio.create_task(well.run())
        [delivered] = await streams.read(limit=1, timeout_s=60.0)
        well.drain()
        await running
    assert delivered.group.rollouts[0].status == "ok"


async def test_a_cancelled_producer_gives_back_what_it_holds(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=2)
    server.hang_on = "crane"
    streams = MemoryStreams()
    await streams.issue([make_ticket()])
    producer = Producer(
        streams=streams,
        policy=scripted_policy(renderer, ["crane"]),
        environment=EnvironmentClient(server.url),
        renderer=renderer,
    )
    running = asyncio.create_task(producer.run())
    async with asyncio.timeout(60.0):
        while not server.said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    lease = await streams.claim("p2", timeout_s=0.0)
    assert lease is not None
    assert lease.deliveries == 1


async def test_a_drain_waits_no_longer_than_told_when_no_further_ticket_would_be_claimed(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=2)
    server.hang_on = "crane"
    streams = MemoryStreams()
    await streams.issue([make_ticket(deadline_s=40.0)])
    producer = Producer(
        streams=streams,
        policy=scripted_policy(renderer, ["crane"]),
        environment=EnvironmentClient(server.url),
        renderer=renderer,
        concurrency=2,
    )
    running = asyncio.create_task(producer.run(drain_s=0.1))
    async with asyncio.timeout(60.0):
        while not server.said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    producer.drain()
    await running
    assert producer.counters.groups_given_back == 1
    assert await streams.claim("p2", timeout_s=0.0) is not None


async def test_a_drain_does_not_wait_for_streams_that_are_away(scripted_policy, renderer):
    class Away(MemoryStreams):
        asked = asyncio.Event()

        async def claim(self, consumer, *, timeout_s):
            self.asked.set()
            await asyncio.sleep(600)

    producer = Producer(
        streams=Away(),
        policy=scripted_policy(renderer),
        environment=EnvironmentClient("http://127.0.0.1:9"),
        renderer=renderer,
        claim_s=0.05,
    )
    running = asyncio.create_task(producer.run())
    await Away.asked.wait()
    producer.drain()
    async with asyncio.timeout(60.0):
        await running


async def test_a_lost_lease_drops_the_work(serve_openenv, scripted_policy, renderer, make_ticket):
    server = await serve_openenv(turns=2)
    server.hang_on = "crane"
    streams = MemoryStreams(lease_s=0.2)
    await streams.issue([make_ticket()])
    async with producing(
        streams=streams,
        policy=scripted_policy(renderer, ["crane"]),
        environment=EnvironmentClient(server.url),
        renderer=renderer,
    ) as producer:
        async with asyncio.timeout(60.0):
            while not server.said:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await streams.cancel_open()
        async with asyncio.timeout(60.0):
            while not producer.counters.leases_lost:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert (await streams.depth()).groups_unread == 0


class _OldReplica:
    """Serves version 1 until it was asked twice."""

    def __init__(self, policy):
        self.asked, self._policy = 0, policy

    async def generate(self, request):
        self.asked += 1
        if self.asked <= 2:
            raise VersionNotServed(wanted=5, serving=1, retry_after_s=0.01)
        return await self._policy.generate(request)


async def test_a_replica_that_is_too_old_is_waited_for(
    serve_openenv, scripted_policy, renderer, make_ticket
):
    server = await serve_openenv(turns=1)
    streams, policy = MemoryStreams(), scripted_policy(renderer)
    await streams.issue([make_ticket(min_version=5)])
    group = await only_group(streams, server, _OldReplica(policy), renderer)
    assert group.rollouts[0].status == "ok"
    assert policy.requests[0].min_version == 5


class _NewReplica:
    async def generate(self, request):
        raise VersionNotServed(wanted=2, serving=9, retry_after_s=0.01)


async def test_a_pinned_version_that_has_passed_ends_the_group_with_a_reason(
    serve_openenv, renderer, make_ticket
):
    server = await serve_openenv(turns=1)
    streams = MemoryStreams()
    await streams.issue([make_ticket(policy_version=2)])
    group = await only_group(streams, server, _NewReplica(), renderer)
    assert all("VersionNotServed" in r.reason for r in group.rollouts)
