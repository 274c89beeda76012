"""Plain lines of a run, for logs and pipes: one per step, sync and evaluation; and who waits for
whom whenever nothing else was said for a while."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from deltawire.cli.observation import Observation
from deltawire.protocol.control import EvalRecord, StepRecord, SyncRecord

_PAUSE_PATIENCE = 2
"""A sync line waits this many further steps for the replicas to say how long they paused."""
QUIET_S = 15.0
"""After so long without a line, one says who waits for whom."""
NOTHING_TO_LEARN = (
    "no group had differing rewards: nothing to learn from; make the reward graded, or raise "
    "group_size"
)


def mib(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.2f} MB"


def step_line(step: StepRecord, steps: int, show: list[str]) -> str:
    """`step 3/40  reward 0.312  version 3  staleness 1.0  …`."""
    extras = "".join(f"  {name} {step.metrics[name]:.3g}" for name in show if name in step.metrics)
    return (
        f"step {step.step}/{steps}  reward {step.reward:.3f}{extras}  version {step.version}  "
        f"staleness {step.staleness:.2f}  tokens {step.tokens}"
        + (f"  errors={step.errors} ({step.error_reason})" if step.errors else "")
    )


def eval_line(record: EvalRecord) -> str:
    """`eval v1 reward 0.021 (8 of 8)`, or how far it came."""
    reward = "without a reward" if record.reward is None else f"reward {record.reward:.3f}"
    line = f"eval v{record.version} {reward} ({record.episodes} of {record.expected})"
    if record.finished < record.expected:
        line = (
            f"eval of version {record.version} not finished: "
            f"{record.finished} of {record.expected}, {reward}"
        )
    if record.error_reason:
        line += f"  errors={record.finished - record.episodes} ({record.error_reason})"
    return line


def teaches_nothing(step: StepRecord) -> bool:
    """Whether all rewards of each group were the same."""
    return step.groups_with_signal == 0


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

    def __init__(
        self, out: TextIO = sys.stdout, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._clock = out, clock
        self._steps = 0
        self._syncs = 0
        self._evals: set[int] = set()
        self._warned = False
        self._said_at = clock()

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, seen: Observation, *, last: bool = False) -> None:
        """Print new steps, syncs and evaluations, or what is waited for."""
        self._show_steps(seen)
        self._show_syncs(seen, last=last)
        for record in seen.evals:
            if record.version not in self._evals:
                self._evals.add(record.version)
                self._print(eval_line(record))
        if not last and self._clock() - self._said_at >= QUIET_S:
            self._print(seen.waiting())

    def say(self, line: str) -> None:
        """One line of the launcher's own."""
        self._print(line)

    def _show_steps(self, seen: Observation) -> None:
        history = seen.history
        for step in history[self._steps :]:
            total = seen.trainer.steps if seen.trainer else len(history)
            self._print(step_line(step, total, seen.show))
            if teaches_nothing(step) and not self._warned:
                self._warned = True
                self._print(f"warning: step {step.step}: {NOTHING_TO_LEARN}")
        self._steps = len(history)

    def _show_syncs(self, seen: Observation, *, last: bool) -> None:
        history = seen.history
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

    def _print(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()
        self._said_at = self._clock()
