"""One run of ours on a job, as a curve."""

import asyncio
from pathlib import Path

from bench.learning.curve import Curve
from bench.learning.in_process import run
from deltawire.job.resolve import ResolvedJob


def learn(resolved: ResolvedJob, *, way: str, scratch: Path) -> Curve:
    """Train to the end. Raises RuntimeError when the run did not get there whole."""
    status = asyncio.run(run(resolved, scratch))
    counts = status.groups
    if status.state != "finished" or counts.lost or counts.doubled:
        raise RuntimeError(f"{way}: {status.state} {status.reason}; groups: {counts}")
    history = status.history
    return Curve(
        way=way,
        seed=resolved.spec.train.seed,
        rewards=[record.reward for record in history],
        seconds=history[-1].finished_at - history[0].finished_at,
        staleness=[record.staleness for record in history],
    )
