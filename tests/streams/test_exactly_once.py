"""Producers die, stall, finish twice and give back, in random order: every ticket ends once."""

import random

import pytest

from deltawire.protocol.errors import LeaseLost

TICKETS = 12


@pytest.mark.parametrize("seed", range(3))
async def test_every_ticket_becomes_one_group_whatever_producers_do(
    backend, make_ticket, make_group, seed
):
    rng = random.Random(seed)
    ids = [f"t-{n}" for n in range(TICKETS)]
    await backend.trainer.issue([make_ticket(ticket_id) for ticket_id in ids])
    held = []
    """Leases somebody believes to hold, lost ones included."""
    trained: list[str] = []
    for step in range(1, 400):
        if step % 20 == 0 and await _all_ended(backend):
            break
        await _one_move(rng, step, backend, make_ticket, make_group, held, ids)
        for delivered in await backend.trainer.read(limit=3, timeout_s=0.0):
            trained.append(delivered.group.group_id)
            await backend.trainer.ack([delivered.entry_id])

    depth = await backend.trainer.depth()
    buried = depth.dead_reasons.get("delivered too often", 0)
    assert len(set(trained)) == len(trained), "none was trained on twice"
    assert len(trained) + buried == TICKETS, "none was lost"
    assert (depth.tickets_open, depth.groups_unread, depth.groups_pending) == (0, 0, 0)


async def _all_ended(backend) -> bool:
    depth = await backend.trainer.depth()
    return depth.tickets_open + depth.groups_unread + depth.groups_pending == 0


async def _one_move(rng, step, backend, make_ticket, make_group, held, ids) -> None:
    """One thing that a producer, or its death, may do."""
    move = rng.choice(
        ["claim", "claim", "finish", "finish", "again", "back", "beat", "die", "issue"]
    )
    if move == "claim":
        lease = await backend.producer.claim(f"p{step}", timeout_s=0.0)
        if lease is not None:
            held.append(lease)
        return
    if move == "die":
        # Nobody beats any more: all leases run out at once.
        await backend.age(40.0)
        return
    if move == "issue":
        await backend.trainer.issue([make_ticket(rng.choice(ids))])
        return
    if not held:
        return
    lease = held[rng.randrange(len(held))]
    try:
        if move == "back":
            await backend.producer.give_back(lease, reason="drain")
        elif move == "beat":
            await backend.producer.heartbeat(lease)
        else:
            group = make_group(lease.ticket.ticket_id)
            key = lease.entry_id if move == "again" else ""
            await backend.producer.finish(lease, group, idempotency_key=key)
    except LeaseLost:
        held.remove(lease)
