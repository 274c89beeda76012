"""Fair times on a shared machine: contenders take turns, and the best of each counts.

Times are CPU seconds of the one thread that works, so that neighbours who take the processor away
do not count; what they do to caches and memory bandwidth still does.
"""

import time
from collections.abc import Callable, Mapping


def best_seconds(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    before: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Least CPU seconds of each, over rounds in which every one runs once. A first, uncounted round
    compiles and touches memory. `before` runs ahead of each call, off the clock."""
    best = dict.fromkeys(contenders, float("inf"))
    for number in range(rounds + 1):
        for name, work in contenders.items():
            if before is not None:
                before()
            begun = time.thread_time()
            work()
            taken = time.thread_time() - begun
            if number:
                best[name] = min(best[name], taken)
    return best
