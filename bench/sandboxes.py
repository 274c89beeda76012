"""Do sandboxes hold the engine up? A thousand programs of one second each, 64 at a time.

Ideal is programs × seconds / sandboxes. Writes bench/results/sandboxes.json.

    python -m bench.sandboxes [--programs 1000] [--sandboxes 64]
"""

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path

from deltawire_environment.sandbox.pool import Program, SandboxPool

RESULTS = Path(__file__).parent / "results" / "sandboxes.json"
ACTION_S = 1.0


async def measure(programs: int, sandboxes: int) -> dict[str, object]:
    """Run them all; how long against the ideal."""
    pool = SandboxPool(limit=sandboxes)
    action = Program(code=f"import time\ntime.sleep({ACTION_S})", wall_s=60.0)
    for _ in range(sandboxes):
        await pool.expect()
    await asyncio.sleep(2.0)  # warm: as when the episodes have been running
    started = time.perf_counter()
    outcomes = await asyncio.gather(*(pool.run(action) for _ in range(programs)))
    took_s = time.perf_counter() - started
    pool.close()
    ideal_s = programs * ACTION_S / sandboxes
    return {
        "programs": programs,
        "sandboxes": sandboxes,
        "took_s": round(took_s, 2),
        "ideal_s": ideal_s,
        "ratio": round(took_s / ideal_s, 3),
        "outcomes": dict(Counter(outcome.status for outcome in outcomes)),
        "load_average": os.getloadavg()[0],
        "processors": os.cpu_count(),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--sandboxes", type=int, default=64)
    given = parser.parse_args()
    found = asyncio.run(measure(given.programs, given.sandboxes))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
