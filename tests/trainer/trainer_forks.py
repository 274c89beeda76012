"""Run by test_kill.py: for each line on stdin forks a whole trainer service, which gets killed.

    python trainer_forks.py SETTINGS.json MARKS

A line is {"phase": "encode", "after": 1, "share": 0.3}: die in that phase of a publish, the second
time it is entered, after that share of the time it took last; or {} to live until killed. A timer
of the kernel ends the process, as kill -9 does: nothing of ours runs any more. Torch is imported
once, here, and not used: its thread pools do not survive a fork. The file MARKS is mapped: there
the phase of the moment outlives the process.
"""

import asyncio
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import deltawire.sync.publisher as publisher_module
from deltawire.sync.ledger import Ledger
from deltawire.sync.published import WholeBits
from deltawire.sync.publisher import Publisher
from deltawire_trainer.publishing import Publishing
from deltawire_trainer.service import run_trainer
from deltawire_trainer.settings import TrainerSettings

PHASES = ("between", "diff", "encode", "upload", "commit", "announce")
_MARKS = struct.Struct(f"<q{len(PHASES)}d")
"""The phase, and the seconds each took last."""


class Marks:
    """Where a publish stands, in memory that outlives the process."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_MARKS.pack(0, *[0.0] * len(PHASES)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @property
    def phase(self) -> str:
        return PHASES[struct.unpack_from("<q", self._memory)[0]]

    def enter(self, phase: str) -> None:
        struct.pack_into("<q", self._memory, 0, PHASES.index(phase))

    def took(self, phase: str) -> float:
        return float(struct.unpack_from("<d", self._memory, 8 + 8 * PHASES.index(phase))[0])

    def note(self, phase: str, seconds: float) -> None:
        struct.pack_into("<d", self._memory, 8 + 8 * PHASES.index(phase), seconds)


class Fate:
    """When this process dies."""

    def __init__(self, marks: Marks, *, phase: str = "", after: int = 0, share: float = 0) -> None:
        self._marks, self._phase, self._share = marks, phase, share
        self._spared = after

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        self._marks.enter(phase)
        if phase == self._phase:
            self._spared -= 1
            if self._spared < 0:
                signal.setitimer(
                    signal.ITIMER_REAL, max(1e-6, self._share * self._marks.took(phase))
                )
        begun = time.perf_counter()
        yield
        self._marks.note(phase, time.perf_counter() - begun)
        self._marks.enter("between")

    def mark(self, owner: Any, name: str, phase: str, *, given: str = "") -> None:
        """Have a function say when it runs; where `given` names an argument, when it has that."""
        inner: Callable[..., Any] = getattr(owner, name)

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            if given and given not in kwargs:
                return inner(*args, **kwargs)
            with self.inside(phase):
                return inner(*args, **kwargs)

        setattr(owner, name, outer)

    def mark_awaited(self, owner: Any, name: str, phase: str) -> None:
        """The same for a coroutine."""
        inner: Callable[..., Awaitable[Any]] = getattr(owner, name)

        @wraps(inner)
        async def outer(*args: Any, **kwargs: Any) -> Any:
            with self.inside(phase):
                return await inner(*args, **kwargs)

        setattr(owner, name, outer)


def live(settings: TrainerSettings, fate: Fate) -> int:
    """The whole service, marked."""
    fate.mark(WholeBits, "diff", "diff")
    fate.mark(Publisher, "_encode", "encode")
    fate.mark(publisher_module, "upload_object", "upload")
    fate.mark(Ledger, "write", "commit", given="version")
    fate.mark_awaited(Publishing, "_announce", "announce")
    return asyncio.run(run_trainer(settings))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(settings: TrainerSettings, marks: Marks) -> None:
    for line in sys.stdin:
        marks.enter("between")
        child = os.fork()
        if child == 0:
            os._exit(live(settings, Fate(marks, **json.loads(line))))
        say("pid", child)
        _, status = os.waitpid(child, 0)
        say("ended", -os.waitstatus_to_exitcode(status), marks.phase)


if __name__ == "__main__":
    main(
        TrainerSettings.model_validate_json(Path(sys.argv[1]).read_text()),
        Marks(Path(sys.argv[2])),
    )
