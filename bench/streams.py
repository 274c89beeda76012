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
from statistics import median
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


class Traffic:
    """A run's streams without a run: tickets go out, groups of one length come home."""

    def __init__(self, url: str, length: int) -> None:
        self.groups = [make_group(length, seed) for seed in range(4)]
        self.trained = 0
        self.latencies_s: list[float] = []
        """From the end of `finish` to the trainer's hands."""
        self._producing, self._training = (
            RedisStreams(redis_client(url), run_id=f"bench{length}") for _ in range(2)
        )
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._stop = asyncio.Event()
        self._finished_at: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """One trainer and its producers set to work."""
        work = [self._issue(), self._train(), *(self._produce(f"p{n}") for n in range(PRODUCERS))]
        self._tasks = [asyncio.create_task(one) for one in work]

    async def stop(self) -> None:
        """Let everybody finish what is in hand."""
        self._stop.set()
        self._room.release()
        await asyncio.gather(*self._tasks)
        for side in (self._producing, self._training):
            await side.close()

    async def _issue(self) -> None:
        numbers = itertools.count()
        while True:
            await self._room.acquire()
            taken = 1
            while not self._room.locked():
                await self._room.acquire()
                taken += 1
            if self._stop.is_set():
                return
            await self._training.issue(
                [
                    Ticket(ticket_id=f"t{n}", task=Task(seed=n), group_size=GROUP_SIZE)
                    for n in itertools.islice(numbers, taken)
                ]
            )

    async def _produce(self, name: str) -> None:
        while not self._stop.is_set():
            lease = await self._producing.claim(name, timeout_s=0.5)
            if lease is not None:
                ticket = lease.ticket
                group = self.groups[ticket.task.seed % len(self.groups)]
                named = group.model_copy(update={"group_id": ticket.ticket_id})
                await self._producing.finish(lease, named)
                self._finished_at[ticket.ticket_id] = time.monotonic()

    async def _train(self) -> None:
        while not self._stop.is_set():
            delivered = await self._training.read(limit=8, timeout_s=0.5)
            now = time.monotonic()
            finished = (self._finished_at.pop(d.group.group_id, None) for d in delivered)
            self.latencies_s += [now - at for at in finished if at is not None]
            await self._training.ack([d.entry_id for d in delivered])
            self.trained += len(delivered)
            for _ in delivered:
                self._room.release()


async def measure(url: str, length: int, seconds: float) -> dict[str, Any]:
    """One length, for about `seconds`."""
    traffic = Traffic(url, length)
    async with Redis.from_url(url) as admin:
        before = await _spent(admin)
        began_at = time.monotonic()
        traffic.start()
        await asyncio.sleep(seconds)
        wall_s = time.monotonic() - began_at
        done, after = traffic.trained, await _spent(admin)
        await traffic.stop()
        memory = await admin.info("memory")
        await admin.flushall()
    ours_s, redis_s = (after[i] - before[i] for i in range(2))
    return {
        "tokens_per_rollout": length,
        "record_bytes": len(encode_group(traffic.groups[0])),
        "groups_per_minute": round(done / wall_s * 60),
        "tokens_per_s": round(done * GROUP_SIZE * length / wall_s),
        "our_cores": round(ours_s / wall_s, 3),
        "redis_cores": round(redis_s / wall_s, 3),
        "our_cpu_ms_per_group": round(ours_s / done * 1e3, 2),
        "our_cores_at_10000_groups_per_minute": round(ours_s / done * 10_000 / 60, 3),
        "finish_to_read_ms_median": round(median(traffic.latencies_s) * 1e3, 1),
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
