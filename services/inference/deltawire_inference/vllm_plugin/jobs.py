"""Work beside the engine's loop, and how whoever asked for it learns that it is over.

A worker cannot be polled cheaply: each call wakes the engine between two steps. So a finished job
leaves a small JSON report, renamed into place, on the local disk that the asker watches.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from deltawire.protocol.errors import DeltawireError

_YIELDS = 10
"""How much nicer than the process a thread beside its main work is: sampling goes first when they
share a core. Not an absolute niceness, which on a machine with other work could mean never."""
_NICEST = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """How a job ended."""

    error: str = ""
    """Empty when all went well."""
    error_type: str = ""
    """Class of the error tree, or EngineError for anything unexpected."""
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> JobReport | None:
        """The report at `path`; None while the job runs."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None


def start_job(work: Callable[[], object], report: Path) -> threading.Thread:
    """Run `work` in a thread of low priority; its end, good or bad, appears at `report`."""
    thread = threading.Thread(target=_run, args=(work, report), name=report.stem, daemon=True)
    thread.start()
    return thread


def yield_to_sampling() -> None:
    """Lower the priority of the calling thread below its process's; never raise it."""
    thread = threading.get_native_id()
    wanted = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _YIELDS
    niceness = min(_NICEST, max(wanted, os.getpriority(os.PRIO_PROCESS, thread)))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _run(work: Callable[[], object], report: Path) -> None:
    yield_to_sampling()
    started = time.perf_counter()
    error, error_type = "", ""
    try:
        work()
    except DeltawireError as failure:
        error, error_type = str(failure), type(failure).__name__
    except Exception as failure:  # noqa: BLE001  (a thread's border: the asker reads the failure)
        error, error_type = f"{type(failure).__name__}: {failure}", "EngineError"
    seconds = time.perf_counter() - started
    ended = JobReport(error=error, error_type=error_type, seconds=seconds)
    unfinished = report.with_name(report.name + ".tmp")
    unfinished.write_text(json.dumps(asdict(ended)))
    unfinished.replace(report)
