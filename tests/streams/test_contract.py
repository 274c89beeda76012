"""What every implementation of the streams seam promises."""

import asyncio

import pytest

from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import LeaseLost, MalformedMessage


async def test_a_ticket_becomes_a_group_the_trainer_reads(backend, make_ticket, make_group):
    await backend.trainer.issue([make_ticket()])

    lease = await backend.producer.claim("p1", timeout_s=5.0)
    assert lease.ticket == make_ticket()
    assert (lease.consumer, lease.deliveries) == ("p1", 1)
    assert await backend.producer.finish(lease, make_group()) is True

    [delivered] = await backend.trainer.read(limit=10, timeout_s=5.0)
    assert delivered.group == make_group()
    assert delivered.redelivered is False


async def test_a_claim_without_tickets_ends_with_nothing(backend):
    assert await backend.producer.claim("p1", timeout_s=0.05) is None


async def test_a_read_without_groups_ends_with_nothing(backend):
    assert await backend.trainer.read(limit=4, timeout_s=0.05) == []


async def test_a_waiting_claim_is_woken_by_a_ticket(backend, make_ticket):
    waiting = asyncio.create_task(backend.producer.claim("p1", timeout_s=10.0))
    await asyncio.sleep(0)
    await backend.trainer.issue([make_ticket()])
    assert (await waiting).ticket.ticket_id == "t-1"


async def test_tickets_come_in_order_and_each_to_one_producer(backend, make_ticket):
    await backend.trainer.issue([make_ticket(f"t-{n}") for n in range(4)])
    claimed = [await backend.producer.claim(f"p{n}", timeout_s=5.0) for n in range(4)]
    assert [lease.ticket.ticket_id for lease in claimed] == ["t-0", "t-1", "t-2", "t-3"]
    assert await backend.producer.claim("p9", timeout_s=0.0) is None


async def test_a_ticket_issued_twice_is_there_once(backend, make_ticket):
    await backend.trainer.issue([make_ticket(), make_ticket()])
    await backend.trainer.issue([make_ticket()])
    assert (await backend.trainer.depth()).tickets_open == 1


async def test_a_ticket_of_a_finished_group_is_not_issued_again(backend, make_ticket, make_group):
    await _finish_one(backend, make_ticket(), make_group())
    await backend.trainer.issue([make_ticket()])
    assert (await backend.trainer.depth()).tickets_open == 0


async def test_a_silent_producers_ticket_is_claimed_by_another(backend, make_ticket):
    await backend.trainer.issue([make_ticket()])
    lost = await backend.producer.claim("p1", timeout_s=5.0)
    assert await backend.producer.claim("p2", timeout_s=0.0) is None

    await backend.age(40.0)
    taken = await backend.producer.claim("p2", timeout_s=5.0)

    assert (taken.ticket, taken.deliveries) == (lost.ticket, 2)
    with pytest.raises(LeaseLost):
        await backend.producer.heartbeat(lost)


async def test_a_heartbeat_keeps_a_long_episode_leased(backend, make_ticket):
    await backend.trainer.issue([make_ticket()])
    lease = await backend.producer.claim("p1", timeout_s=5.0)
    for _ in range(5):
        await backend.age(20.0)
        await backend.producer.heartbeat(lease)
    await backend.age(5.0)
    assert await backend.producer.claim("p2", timeout_s=0.0) is None


async def test_a_heartbeat_is_not_a_delivery(backend, make_ticket):
    await backend.trainer.issue([make_ticket()])
    lease = await backend.producer.claim("p1", timeout_s=5.0)
    for _ in range(9):
        await backend.producer.heartbeat(lease)
    await backend.age(40.0)
    assert (await backend.producer.claim("p2", timeout_s=5.0)).deliveries == 2


async def test_a_ticket_given_back_is_claimed_at_once_and_not_counted(backend, make_ticket):
    await backend.trainer.issue([make_ticket()])
    for n in range(10):
        lease = await backend.producer.claim(f"p{n}", timeout_s=5.0)
        assert lease.deliveries == 1
        await backend.producer.give_back(lease, reason="drain")
    with pytest.raises(LeaseLost):
        await backend.producer.give_back(lease, reason="twice")
    with pytest.raises(LeaseLost):
        await backend.producer.heartbeat(lease)


async def test_a_ticket_that_kills_producers_is_dead_lettered(backend, make_ticket):
    await backend.trainer.issue([make_ticket("poison"), make_ticket("good")])
    for n in range(3):
        assert (await backend.producer.claim(f"p{n}", timeout_s=5.0)).ticket.ticket_id == "poison"
        await backend.age(40.0)

    assert (await backend.producer.claim("p9", timeout_s=5.0)).ticket.ticket_id == "good"

    depth = await backend.trainer.depth()
    assert (depth.dead, depth.dead_reasons) == (1, {"delivered too often": 1})
    assert depth.tickets_open == 1


async def test_the_first_of_two_groups_of_a_ticket_wins(backend, make_ticket, make_group):
    await backend.trainer.issue([make_ticket()])
    slow = await backend.producer.claim("slow", timeout_s=5.0)
    await backend.age(40.0)
    quick = await backend.producer.claim("quick", timeout_s=5.0)

    assert await backend.producer.finish(slow, make_group(reward=1.0)) is True
    assert await backend.producer.finish(quick, make_group(reward=2.0)) is False

    delivered = await backend.trainer.read(limit=10, timeout_s=1.0)
    assert [d.group.rollouts[0].reward for d in delivered] == [1.0]
    assert (await backend.trainer.depth()).doubled == 1


async def test_a_repeated_finish_with_one_key_is_one_finish(backend, make_ticket, make_group):
    await backend.trainer.issue([make_ticket()])
    lease = await backend.producer.claim("p1", timeout_s=5.0)
    for _ in range(3):
        assert await backend.producer.finish(lease, make_group(), idempotency_key="k") is True
    depth = await backend.trainer.depth()
    assert (depth.groups_unread, depth.doubled) == (1, 0)


async def test_a_group_of_another_ticket_is_refused(backend, make_ticket, make_group):
    await backend.trainer.issue([make_ticket()])
    lease = await backend.producer.claim("p1", timeout_s=5.0)
    with pytest.raises(MalformedMessage, match="t-2"):
        await backend.producer.finish(lease, make_group("t-2"))


async def test_the_group_of_a_withdrawn_ticket_is_refused(backend, make_ticket, make_group):
    await backend.trainer.issue([make_ticket("t-1"), make_ticket("t-2")])
    lease = await backend.producer.claim("p1", timeout_s=5.0)

    assert sorted(await backend.trainer.cancel_open()) == ["t-1", "t-2"]

    with pytest.raises(LeaseLost):
        await backend.producer.finish(lease, make_group())
    with pytest.raises(LeaseLost):
        await backend.producer.heartbeat(lease)
    assert await backend.producer.claim("p2", timeout_s=0.0) is None
    assert (await backend.trainer.depth()).groups_unread == 0


async def test_what_was_withdrawn_is_told_again_to_whoever_did_not_hear_it(
    backend, make_ticket, make_group
):
    """The answer may have been lost, or the trainer killed before it noted what it heard."""
    await _finish_one(backend, make_ticket("t-0"), make_group("t-0"))
    await backend.trainer.issue([make_ticket("t-1"), make_ticket("t-2")])
    await backend.trainer.cancel_open()

    await backend.trainer.issue([make_ticket("t-1"), make_ticket("t-3")])

    assert sorted(await backend.trainer.cancel_open()) == ["t-1", "t-2", "t-3"]
    assert (await backend.trainer.depth()).tickets_open == 0


async def test_groups_are_read_once_and_stay_pending_until_acked(backend, make_ticket, make_group):
    for n in range(3):
        await _finish_one(backend, make_ticket(f"t-{n}"), make_group(f"t-{n}"))

    first = await backend.trainer.read(limit=2, timeout_s=5.0)
    second = await backend.trainer.read(limit=2, timeout_s=5.0)
    assert [d.group.group_id for d in first + second] == ["t-0", "t-1", "t-2"]
    assert await backend.trainer.read(limit=2, timeout_s=0.05) == []
    assert (await backend.trainer.depth()).groups_pending == 3

    await backend.trainer.ack([d.entry_id for d in first])
    depth = await backend.trainer.depth()
    assert (depth.groups_unread, depth.groups_pending) == (0, 1)


async def test_a_group_set_aside_is_counted_with_its_reason(backend, make_ticket, make_group):
    await _finish_one(backend, make_ticket(), make_group())
    [delivered] = await backend.trainer.read(limit=1, timeout_s=5.0)
    await backend.trainer.dead_letter(delivered, reason="token id outside the vocabulary: 99999")
    depth = await backend.trainer.depth()
    assert depth.dead_reasons == {"token id outside the vocabulary": 1}
    assert depth.groups_pending == 0


async def test_depth_counts_what_is_under_way(backend, make_ticket, make_group):
    await backend.trainer.issue([make_ticket(f"t-{n}") for n in range(3)])
    lease = await backend.producer.claim("p1", timeout_s=5.0)
    await backend.producer.finish(lease, make_group("t-0"))
    await backend.producer.claim("p1", timeout_s=5.0)
    depth = await backend.trainer.depth()
    assert (depth.tickets_open, depth.groups_unread, depth.groups_pending) == (2, 1, 0)


async def test_a_replica_is_known_while_its_heart_beats(backend):
    status = ReplicaStatus(
        replica_id="r1", run_id="run", engine="torch", state="serving", version=4
    )
    await backend.producer.register(status, ttl_s=60.0)
    await backend.producer.register(status.model_copy(update={"version": 5}), ttl_s=60.0)
    [known] = await backend.trainer.replicas()
    assert (known.replica_id, known.version) == ("r1", 5)


async def test_a_replica_without_heartbeat_is_forgotten(backend):
    status = ReplicaStatus(
        replica_id="r1", run_id="run", engine="torch", state="serving", version=4
    )
    await backend.producer.register(status, ttl_s=0.01)
    await backend.age(1.0)
    await asyncio.sleep(0.02)
    assert await backend.trainer.replicas() == []


async def _finish_one(backend, ticket, group):
    await backend.trainer.issue([ticket])
    lease = await backend.producer.claim("p", timeout_s=5.0)
    assert await backend.producer.finish(lease, group)


async def test_dead_letters_tell_their_ids_and_reasons_in_order(backend, make_ticket, make_group):
    for n in range(3):
        await _finish_one(backend, make_ticket(f"t-{n}"), make_group(f"t-{n}"))
    for delivered in await backend.trainer.read(limit=3, timeout_s=5.0):
        await backend.trainer.dead_letter(delivered, reason=f"of {delivered.group.group_id}")

    first = await backend.trainer.dead_letters(limit=2)
    rest = await backend.trainer.dead_letters(after=first[-1].entry_id)

    assert [(d.id, d.reason) for d in first] == [("t-0", "of t-0"), ("t-1", "of t-1")]
    assert [d.id for d in rest] == ["t-2"]
    assert await backend.trainer.dead_letters(after=rest[-1].entry_id) == []


async def test_a_late_group_of_an_acked_ticket_is_refused(backend, make_ticket, make_group):
    await backend.trainer.issue([make_ticket()])
    slow = await backend.producer.claim("slow", timeout_s=5.0)
    await backend.age(40.0)
    quick = await backend.producer.claim("quick", timeout_s=5.0)
    assert await backend.producer.finish(quick, make_group(), idempotency_key="k") is True
    [delivered] = await backend.trainer.read(limit=1, timeout_s=5.0)
    await backend.trainer.ack([delivered.entry_id])

    assert await backend.producer.finish(slow, make_group()) is False
    assert await backend.producer.finish(quick, make_group(), idempotency_key="k") is True

    depth = await backend.trainer.depth()
    assert (depth.tickets_open, depth.groups_unread, depth.groups_pending) == (0, 0, 0)
