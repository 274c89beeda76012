"""Rollout groups a minute through one Redis, with what our code and Redis spend on it.

Tickets are issued, claimed, finished, read and acked as a run does it. Both sides are here, so
"our CPU" is encoding, decoding and validation of both. Token ids and logprobs are drawn at random:
nothing for zstd to find beyond the masks. Writes bench/results/streams.json.

    python bench/streams.py [--seconds 20]
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence, Task, Ticket, Turn
from deltawire.protocol.versions import VersionSpan
from deltawire.streams import local_server
from deltawire.streams.records import encode_group
from deltawire.streams.redis import RedisStreams
from deltawire.streams.redis_client import redis_client

GROUP_SIZE = 8
LENGTHS = (512, 2048, 8192, 32768)
PRODUCERS = 8
IN_FLIGHT = 16
"""Open tickets plus unread groups: what back-pressure allows."""
VOCABULARY = 49152
RESULTS = Path(__file__).parent / "results" / "streams.json"


def make_group(length: int, seed: int) -> RolloutGroup:
    """A group of 8 rollouts of `length` tokens, a quarter of them prompt."""
    rng = random.Random(seed)
    prompt = length // 4
    rollouts = []
    for number in range(GROUP_SIZE):
        sequence = Sequence(
            token_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
            loss_mask=[0] * prompt + [1] * (length - prompt),
            logprobs=[0.0] * prompt + [-rng.random() * 4 for _ in range(length - prompt)],
            spans=[VersionSpan(version=3, start=prompt, end=length)],
            turns=[Turn(start=prompt, end=length, reward=0.5)],
            reward=0.5,
        )
        rollouts.append(Rollout(rollout_id=f"r/{number}", sequences=[sequence], reward=0.5))
    return RolloutGroup(group_id="g", task=Task(seed=seed), rollouts=rollouts)


async def measure(url: str, length: int, seconds: float) -> dict[str, Any]:
    """One length, for about `seconds`."""
    groups = [make_group(length, seed) for seed in range(4)]
    run_id = f"bench{length}"
    sides = [RedisStreams(redis_client(url), run_id=run_id) for _ in range(2)]
    producer_side, trainer_side = sides
    room = asyncio.Semaphore(IN_FLIGHT)
    stop = asyncio.Event()
    finished_at: dict[str, float] = {}
    latencies_s: list[float] = []
    trained = 0

    async def issue() -> None:
        numbers = itertools.count()
        while True:
            await room.acquire()
            taken = 1
            while not room.locked():
                await room.acquire()
                taken += 1
            if stop.is_set():
                return
            await trainer_side.issue(
                [
                    Ticket(ticket_id=f"t{n}", task=Task(seed=n), group_size=GROUP_SIZE)
                    for n in itertools.islice(numbers, taken)
                ]
            )

    async def produce(name: str) -> None:
        while not stop.is_set():
            lease = await producer_side.claim(name, timeout_s=0.5)
            if lease is not None:
                ticket_id = lease.ticket.ticket_id
                group = groups[lease.ticket.task.seed % len(groups)]
                await producer_side.finish(lease, group.model_copy(update={"group_id": ticket_id}))
                finished_at[ticket_id] = time.monotonic()

    async def train() -> None:
        nonlocal trained
        while not stop.is_set():
            delivered = await trainer_side.read(limit=8, timeout_s=0.5)
            now = time.monotonic()
            latencies_s.extend(
                now - finished_at[d.group.group_id]
                for d in delivered
                if d.group.group_id in finished_at
            )
            await trainer_side.ack([d.entry_id for d in delivered])
            trained += len(delivered)
            for _ in delivered:
                room.release()

    admin = Redis.from_url(url)
    before = await _spent(admin)
    began_at = time.monotonic()
    tasks = [asyncio.create_task(work) for work in (issue(), train())]
    tasks += [asyncio.create_task(produce(f"p{n}")) for n in range(PRODUCERS)]
    await asyncio.sleep(seconds)
    wall_s = time.monotonic() - began_at
    done, after = trained, await _spent(admin)
    stop.set()
    room.release()
    await asyncio.gather(*tasks)
    memory = await admin.info("memory")
    await admin.flushall()
    for side in sides:
        await side.close()
    await admin.aclose()
    ours_s, redis_s = (after[i] - before[i] for i in range(2))
    return {
        "tokens_per_rollout": length,
        "record_bytes": len(encode_group(groups[0])),
        "groups_per_minute": round(done / wall_s * 60),
        "tokens_per_s": round(done * GROUP_SIZE * length / wall_s),
        "our_cores": round(ours_s / wall_s, 3),
        "redis_cores": round(redis_s / wall_s, 3),
        "our_cpu_ms_per_group": round(ours_s / done * 1e3, 2),
        "our_cores_at_10000_groups_per_minute": round(ours_s / done * 10_000 / 60, 3),
        "finish_to_read_ms_median": round(sorted(latencies_s)[len(latencies_s) // 2] * 1e3, 1),
        "redis_peak_bytes": memory["used_memory_peak"],
    }


async def _spent(admin: Redis) -> tuple[float, float]:
    """CPU seconds so far: ours, and those of Redis."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    info = await admin.info("cpu")
    return usage.ru_utime + usage.ru_stime, info["used_cpu_user"] + info["used_cpu_sys"]


async def run(seconds: float) -> dict[str, Any]:
    """All lengths on a fresh server with its append-only file on."""
    with tempfile.TemporaryDirectory() as folder:
        server = local_server.start(Path(folder))
        try:
            admin = Redis.from_url(server.url)
            version = (await admin.info("server"))["redis_version"]
            await admin.aclose()
            rows = []
            for length in LENGTHS:
                rows.append(await measure(server.url, length, seconds))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            server.stop()
    return {
        "what": f"groups of {GROUP_SIZE} rollouts through one Redis, append-only file on",
        "redis": version,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 1),
        "producers": PRODUCERS,
        "seconds_per_row": seconds,
        "rows": rows,
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=20.0)
    results = asyncio.run(run(arguments.parse_args().seconds))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
