"""Plain lines of a run, for logs and pipes: one per step, one per sync."""

import sys
from typing import TextIO

from deltawire.cli.observation import Observation
from deltawire.protocol.control import StepRecord, SyncRecord

_PAUSE_PATIENCE = 2
"""A sync line waits this many further steps for the replicas to say how long they paused."""


def mib(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.2f} MB"


def step_line(step: StepRecord, steps: int, show: list[str]) -> str:
    """`step 3/40  reward 0.312  version 3  staleness 1.0  …`."""
    extras = "".join(f"  {name} {step.metrics[name]:.3g}" for name in show if name in step.metrics)
    return (
        f"step {step.step}/{steps}  reward {step.reward:.3f}{extras}  version {step.version}  "
        f"staleness {step.staleness:.2f}  tokens {step.tokens}"
    )


def sync_line(sync: SyncRecord, pauses_ms: list[float]) -> str:
    """How many elements changed of how many, the file, the whole time and the pause in it."""
    pause = f"{max(pauses_ms):.1f} ms" if pauses_ms else "not yet known"
    return (
        f"sync {sync.version}  changed {sync.changed:,} of {sync.total:,} "
        f"(sparsity {100 * (1 - sync.density):.3f} %)  {sync.key} {mib(sync.bytes)} of "
        f"{mib(sync.full_bytes)}  {sync.encoding}  total {sync.total_s:.2f} s, "
        f"inference paused {pause}"
    )


class PlainView:
    """Prints what is new since the last look."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._steps = 0
        self._syncs = 0

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, seen: Observation, *, last: bool = False) -> None:
        """Print new steps and syncs."""
        history = seen.history
        for step in history[self._steps :]:
            total = seen.trainer.steps if seen.trainer else len(history)
            self._print(step_line(step, total, seen.show))
        self._steps = len(history)
        pauses = seen.pauses_ms()
        while self._syncs < len(history):
            sync = history[self._syncs].sync
            known = sync is not None and bool(pauses.get(sync.version))
            patient = self._syncs + _PAUSE_PATIENCE >= len(history)
            if patient and not known and not last:
                break
            if sync is not None:
                self._print(sync_line(sync, pauses.get(sync.version, [])))
            self._syncs += 1

    def say(self, line: str) -> None:
        """One line of the launcher's own."""
        self._print(line)

    def _print(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()
