"""The processes of one run on one machine: started, waited for, watched, stopped.

A child that ends before it was ready, or with its own clear error (exit code 2), ends the run: it
is named with the tail of its log. One that dies later (killed, out of memory) is started again, a
few times: the bucket and the streams make that cheap.
"""

import asyncio
import ctypes
import logging
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from deltawire.control.client import ServiceClient
from deltawire.protocol.errors import DeltawireError

log = logging.getLogger(__name__)

_RESTARTS = 3
_STOP_S = 3.0
_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
_CLEAR_ERROR = 2
"""Exit code of a service that stopped with one clear sentence."""


class ChildDied(DeltawireError):
    """A process of the run ended on its own."""

    def __init__(self, name: str, code: int, tail: str, log_path: Path) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        # A service that stopped on purpose ends its log with the sentence that says why.
        why = tail.splitlines()[-1].strip() if code == _CLEAR_ERROR else f"\n{tail}"
        super().__init__(f"{name} {how}; the end of {log_path}: {why}")
        self.name, self.code = name, code


@dataclass(slots=True, kw_only=True)
class Child:
    """One service process. Its output goes to its log file."""

    name: str
    command: list[str]
    environ: Mapping[str, str]
    log_path: Path
    url: str
    token: SecretStr
    restarts: int = 0
    ready: bool = False
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    async def start(self) -> None:
        """Start the process, in a session of its own so that Ctrl-C reaches only the launcher."""
        with self.log_path.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env=dict(self.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=end_with_launcher,
            )
        self.ready = False

    async def wait_ready(self, timeout_s: float) -> None:
        """Poll /readyz. Raises ChildDied when the process ends first, or takes too long."""
        deadline = time.monotonic() + timeout_s
        async with ServiceClient(self.url, token=self.token, timeout_s=3.0) as client:
            while (reason := await client.unready()) != "":
                self.raise_if_dead()
                if time.monotonic() > deadline:
                    raise DeltawireError(
                        f"{self.name} was not ready after {timeout_s:.0f} s: {reason}; "
                        f"its log: {self.log_path}\n{self.tail()}"
                    )
                await asyncio.sleep(0.2)
        self.ready = True

    def raise_if_dead(self) -> None:
        """Raises ChildDied with the tail of the log."""
        if self.process is not None and self.process.returncode is not None:
            raise ChildDied(self.name, self.process.returncode, self.tail(), self.log_path)

    async def revive(self) -> bool:
        """Start again after a sudden death; False while alive. Raises ChildDied when hopeless."""
        if self.process is None or self.process.returncode is None:
            return False
        if not self.ready or self.process.returncode == _CLEAR_ERROR or self.restarts >= _RESTARTS:
            self.raise_if_dead()
        self.restarts += 1
        log.warning(
            "process died and is started again",
            extra={"child": self.name, "code": self.process.returncode, "restart": self.restarts},
        )
        await self.start()
        self.ready = True
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it is alive."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]) or "    (empty)"


def end_with_launcher() -> None:
    """In the child: ask Linux for its end when the launcher is gone, however it went.

    SIGKILL, not SIGTERM: a drain among peers that all die takes its time, and nobody is left to
    cut it short. No process of a run loses anything by it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def stop_all(children: list[Child]) -> None:
    """SIGTERM to all at once, SIGKILL to what is left after a few seconds."""
    for child in children:
        child.signal(signal.SIGTERM)
    alive = [c.process for c in children if c.process is not None and c.process.returncode is None]
    if not alive:
        return
    waits = [asyncio.ensure_future(process.wait()) for process in alive]
    _, late = await asyncio.wait(waits, timeout=_STOP_S)
    for child in children:
        child.signal(signal.SIGKILL)
    if late:
        await asyncio.wait(late, timeout=1.0)
