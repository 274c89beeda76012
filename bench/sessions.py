"""What sessions cost the environment service, and whether any stays: the real OpenEnv client plays.

First many games of six turns at once, then ten thousand one after the other, three in ten of whose
clients are cut off at a random turn. The service is a process of its own; its memory and processor
time are read from outside. Writes bench/results/sessions.json.

    python -m bench.sessions [--parallel 256] [--sequential 10000]
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
from openenv.core import GenericEnvClient

RESULTS = Path(__file__).parent / "results" / "sessions.json"
TURNS = 6
CUT_SHARE = 0.3
GRACE_S = 2.0
"""A cut session may be taken up again for so long; then it must be gone."""
WORDS = ("crane", "moist", "bulky", "fudge", "whelp", "jumbo")
Found = dict[str, float | int]


@asynccontextmanager
async def service(parallel: int) -> AsyncIterator[tuple[str, psutil.Process]]:
    """The environment service with the guessing game; its URL and its process."""
    told = {
        "ENVIRONMENT_PORT": "0",
        "ENVIRONMENT_LOG_FORMAT": "json",
        "ENVIRONMENT_MAX_SESSIONS": str(parallel),
        "ENVIRONMENT_GRACE_S": str(GRACE_S),
    }
    command = [sys.executable, "-m", "deltawire_environment"]
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | told, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(rb'"port": (\d+)', line):
            break
    else:
        raise RuntimeError("the service did not start")
    reading = asyncio.create_task(process.stderr.read())
    try:
        yield f"http://127.0.0.1:{int(found[1])}", psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()
        await reading


async def play(url: str, seed: int, *, together: asyncio.Barrier | None = None) -> None:
    """One whole game, the real client's. With a barrier, all hold their session at once."""
    async with GenericEnvClient(base_url=url, connect_timeout_s=120) as client:
        await client.reset(seed=seed)
        if together is not None:
            await together.wait()
        for word in WORDS:
            if (await client.step({"guess": word})).done:
                break


async def play_and_vanish(url: str, seed: int, turns: int) -> None:
    """A client whose machine goes away in mid-game: nothing is closed, the connection is reset."""
    client = GenericEnvClient(base_url=url)
    await client.reset(seed=seed)
    for word in WORDS[:turns]:
        if (await client.step({"guess": word})).done:
            break
    client._ws.transport.abort()


async def emptied(url: str) -> None:
    """Wait until the service says that it holds no session."""
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        for _ in range(300):
            answer = (await http.get("/capacity")).raise_for_status().json()
            if answer["active_sessions"] == 0:
                return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"sessions that nobody holds: {answer}")


async def at_once(url: str, process: psutil.Process, count: int) -> Found:
    """So many games side by side."""
    before_bytes, before_s = process.memory_info().rss, sum(process.cpu_times()[:2])
    together = asyncio.Barrier(count)
    await asyncio.gather(*(play(url, seed, together=together) for seed in range(count)))
    await emptied(url)
    return {
        "sessions": count,
        "memory_mb": round((process.memory_info().rss - before_bytes) / 1e6, 1),
        "processor_s": round(sum(process.cpu_times()[:2]) - before_s, 2),
    }


async def one_after_another(url: str, process: psutil.Process, count: int) -> Found:
    """So many games in a row, some of them cut."""
    rng = random.Random(0)
    cut, before_bytes, begun = 0, process.memory_info().rss, time.perf_counter()
    for seed in range(count):
        if rng.random() < CUT_SHARE:
            cut += 1
            await play_and_vanish(url, seed, rng.randrange(TURNS))
        else:
            await play(url, seed)
    await emptied(url)
    return {
        "sessions": count,
        "cut": cut,
        "left_behind": 0,
        "memory_growth_mb": round((process.memory_info().rss - before_bytes) / 1e6, 1),
        "took_s": round(time.perf_counter() - begun, 1),
    }


async def measure(parallel: int, sequential: int) -> dict[str, Found]:
    """Both, on one service that has been warmed up by a few games."""
    async with service(parallel) as (url, process):
        for seed in range(20):
            await play(url, seed)
        return {
            "at once": await at_once(url, process, parallel),
            "one after another": await one_after_another(url, process, sequential),
        }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", type=int, default=256)
    parser.add_argument("--sequential", type=int, default=10_000)
    given = parser.parse_args()
    found = asyncio.run(measure(given.parallel, given.sequential))
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
