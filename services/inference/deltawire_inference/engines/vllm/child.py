"""`vllm serve` as a child: start, wait until it answers, notice its end, stop it.

    stopped ── start ──> starting ── /health ──> running ── exit or stop ──> stopped

The child listens on a socket in a folder that only this user may enter, as vLLM's development
routes ask for no key. It runs on a leash (leash.py), so it never outlives this process; what a
predecessor left behind is found by its recorded process group and killed before a new start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltawire.protocol.errors import EngineError
from deltawire_inference.engines.vllm.client import VllmClient

log = logging.getLogger(__name__)

_TAIL_LINES = 40
_POLL_S = 0.2
_WATCH_S = 0.5
_DEAD_LOOKS = 4
"""So often in a row: a server with a full queue of connections refuses one more, too."""
_STOP_GRACE_S = 1.5
"""vLLM keeps nothing that is worth a longer wait, and whoever stops a service waits 3 s for it."""
_LEASH = "deltawire_inference.engines.vllm.leash"


class VllmChild:
    """One child at a time."""

    def __init__(self, *, socket: Path, memory: Path) -> None:
        """`memory` is removed when this process is killed and its child with it."""
        self._socket, self._memory = socket, memory
        self._group_file = socket.with_suffix(".pgid")
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._answered = False
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may not answer yet)."""
        return self._process is not None and self._process.returncode is None

    @property
    def tail(self) -> str:
        """The last lines it wrote."""
        return "\n".join(self._tail)

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        client: VllmClient,
        *,
        timeout_s: float,
    ) -> float:
        """Start, and return the seconds until it answered.

        Raises:
            EngineError: It ended or did not answer in time; the message holds its last lines.
        """
        await self.stop()
        self._socket.unlink(missing_ok=True)
        self._answered = False
        started = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _LEASH, str(self._memory), *command),
            env=dict(environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._group_file.write_text(f"{self._process.pid} {_birth(self._process.pid)}")
        self._watcher = asyncio.create_task(self._watch(self._process, client))
        while not await client.healthy():
            if not self.alive:
                raise EngineError(f"vLLM ended while starting:\n{self.tail}")
            if time.monotonic() - started > timeout_s:
                await self.stop()
                raise EngineError(f"vLLM did not answer within {timeout_s:.0f} s:\n{self.tail}")
            await asyncio.sleep(_POLL_S)
        self._answered = True
        return time.monotonic() - started

    async def stop(self) -> None:
        """Ask the whole group to stop, then kill it; what a predecessor left is killed at once."""
        process, self._process = self._process, None
        self._answered = False
        if process is None:
            kill_leftover(self._group_file)
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_GRACE_S):
                await process.wait()
        except TimeoutError:
            log.warning("vLLM did not stop and is killed", extra={"pid": process.pid})
        _signal_group(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()  # only now: the leash takes it for our end
        if self._watcher is not None:
            await self._watcher
        self._group_file.unlink(missing_ok=True)

    async def _watch(self, process: asyncio.subprocess.Process, client: VllmClient) -> None:
        """Read its lines; when the leader or the server in it has ended, end the group.

        A rank that outlived its server would hold sockets open on which our calls wait for ever,
        and the pipe, without whose end asyncio's own `wait` does not return.
        """
        reading = asyncio.create_task(self._read_lines(process))
        looks = 0
        while process.returncode is None and looks < _DEAD_LOOKS:
            await asyncio.sleep(_WATCH_S)
            dead = self._answered and await client.health() == "dead"
            looks = looks + 1 if dead else 0
        if looks == _DEAD_LOOKS:
            log.warning("vLLM's engine has ended, its server is killed", extra={"pid": process.pid})
        _signal_group(process.pid, signal.SIGKILL)
        await reading

    async def _read_lines(self, process: asyncio.subprocess.Process) -> None:
        """Pass the child's output on, line by line, and keep its tail for errors."""
        assert process.stdout is not None
        while chunk := await process.stdout.read(65536):
            for line in chunk.decode(errors="replace").splitlines():
                self._tail.append(line)
                log.debug("vllm", extra={"line": line})


def kill_leftover(group_file: Path) -> None:
    """Kill the process group a predecessor recorded, if it is still the same one.

    A leader that is gone while its group lives on is fine too: its number is not given away.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid, birth = (int(part) for part in group_file.read_text().split())
        if _birth(pid) in (birth, 0):
            log.warning("a predecessor's vLLM is killed", extra={"pid": pid})
            _signal_group(pid, signal.SIGKILL)
    group_file.unlink(missing_ok=True)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _birth(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc(5), field 22); 0 when it is gone.

    With it a recorded pid names one process, not whichever got the number later.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
