"""Warm sandboxes, one program each, and what came of it.

A sandbox is a forked child that waits for its program. At least one is kept ready for every episode
that runs, up to the limit, so that no engine waits for a process to start; how long programs waited
for one is a metric.
"""

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from deltawire.job.world import Meter
from deltawire.protocol.errors import EpisodeFailed, SettingsError
from deltawire_environment.sandbox import seccomp
from deltawire_environment.sandbox.child import UNCONFINED
from deltawire_environment.sandbox.forks import Child, Forks

Status = Literal["ok", "crashed", "timeout", "output", "killed"]
Mode = Literal["private", "closed"]
"""private: namespaces and a scratch folder where the kernel allows them; closed: no files."""

_OUTPUT_BYTES = 64 * 1024
_RESULTS_BYTES = 1024 * 1024
_PROGRAM_BYTES = 256 * 1024
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function of the program to call, with plain data."""

    function: str
    arguments: list[JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Source to run, then functions to call. `wall_s` is for all of it."""

    code: str
    calls: Sequence[Call] = ()
    wall_s: float = 5.0

    def encoded(self) -> bytes:
        """As the child reads it."""
        calls = [{"function": c.function, "arguments": c.arguments} for c in self.calls]
        return json.dumps({"code": self.code, "calls": calls}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a program."""

    status: Status
    output: str
    """What it printed, shortened."""
    results: list[dict[str, JsonValue]] = field(default_factory=list)
    """`{"value": ...}` or `{"error": ...}` for each call that was answered, in order."""


class SandboxPool:
    """Sandboxes behind one fork server, which starts on first use and again when it died."""

    def __init__(
        self,
        *,
        limit: int,
        mode: Mode = "private",
        memory_bytes: int = 128 * 1024 * 1024,
        cpu_s: int = 4,
    ) -> None:
        """Raises SettingsError where the system call filter does not work."""
        if not sys.platform.startswith("linux") or not seccomp.supported():
            raise SettingsError("the code world needs Linux on x86_64 or aarch64")
        self.limit = limit
        self.meter: Meter | None = None
        """Told how long programs waited for a sandbox and ran, and how they ended."""
        self._mode = mode
        self._memory_bytes, self._cpu_s = memory_bytes, cpu_s
        self._free = asyncio.Semaphore(limit)
        self._episodes = 0
        self._ready: deque[Child] = deque()
        self._forks: Forks | None = None
        self._starting = asyncio.Lock()

    @property
    def warm(self) -> int:
        """Sandboxes that wait for a program."""
        return len(self._ready)

    @property
    def private(self) -> bool | None:
        """Whether programs have a scratch folder; None before the first one."""
        return None if self._forks is None else self._forks.private

    async def expect(self) -> None:
        """An episode begins that will run programs: have a sandbox ready for it."""
        self._episodes += 1
        self._fill(await self._running())

    def forget(self) -> None:
        """An episode has ended."""
        self._episodes -= 1

    async def run(self, program: Program) -> Outcome:
        """Run one program. Raises EpisodeFailed when no sandbox can be had at all."""
        body = program.encoded()
        if len(body) > _PROGRAM_BYTES:
            return Outcome(status="crashed", output=f"longer than {_PROGRAM_BYTES} bytes")
        asked = time.perf_counter()
        await self._free.acquire()
        try:
            forks, child = await self._take()
            self._fill(forks)  # the next one gets ready while this one runs
            given = time.perf_counter()
            try:
                outcome = await self._run_in(forks, child, body, program.wall_s)
            finally:
                forks.kill(child)
                child.close()
        finally:
            self._free.release()
        if self.meter is not None:
            self.meter.observe("sandbox_wait", given - asked)
            self.meter.observe("sandbox_run", time.perf_counter() - given)
            self.meter.count("sandbox_programs_total", status=outcome.status)
        return outcome

    def close(self) -> None:
        """End every sandbox."""
        for child in self._ready:
            child.close()
        self._ready.clear()
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    async def _running(self) -> Forks:
        async with self._starting:
            if self._forks is None or not self._forks.alive:
                self.close()
                self._forks = await Forks.start(
                    mode=self._mode, memory_bytes=self._memory_bytes, cpu_s=self._cpu_s
                )
            return self._forks

    async def _take(self) -> tuple[Forks, Child]:
        """A child that waits for its program, from a server that lives."""
        forks = await self._running()
        try:
            return forks, self._ready.popleft() if self._ready else forks.fork()
        except EpisodeFailed:  # it died since we looked
            self.close()
            forks = await self._running()
            return forks, forks.fork()

    def _fill(self, forks: Forks) -> None:
        with contextlib.suppress(EpisodeFailed):  # the next program will find out
            while len(self._ready) < min(self._episodes, self.limit):
                self._ready.append(forks.fork())

    async def _run_in(self, forks: Forks, child: Child, body: bytes, wall_s: float) -> Outcome:
        output, results = bytearray(), bytearray()
        status: Status = "ok"
        try:
            async with asyncio.timeout(wall_s):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await asyncio.get_running_loop().sock_sendall(child.talk, body)
                    child.talk.shutdown(socket.SHUT_WR)
                flooded = await asyncio.gather(
                    _collect(forks, child, child.output, output, _OUTPUT_BYTES),
                    _collect(forks, child, child.talk, results, _RESULTS_BYTES),
                )
                if any(flooded):
                    status = "output"
        except TimeoutError:
            status = "timeout"
        code = await _end(forks, child, kill=status != "ok")
        if code == UNCONFINED:
            raise EpisodeFailed(f"the kernel did not let a program be confined: {bytes(output)!r}")
        return Outcome(
            status=status if status != "ok" else _status_of(code),
            output=output.decode(errors="replace"),
            results=_parse(bytes(results)),
        )


async def _collect(
    forks: Forks, child: Child, source: socket.socket, into: bytearray, limit: int
) -> bool:
    """Read to the end; a child that says more than `limit` is killed, and this is True."""
    loop = asyncio.get_running_loop()
    while len(into) < limit:
        try:
            chunk = await loop.sock_recv(source, min(1 << 16, limit - len(into)))
        except ConnectionResetError:
            return False
        if not chunk:
            return False
        into += chunk
    forks.kill(child)
    return True


async def _end(forks: Forks, child: Child, *, kill: bool) -> int:
    if kill:
        forks.kill(child)
    try:
        async with asyncio.timeout(_END_S):
            return await asyncio.shield(child.ended)
    except TimeoutError:
        forks.kill(child)
        return await child.ended


def _status_of(code: int) -> Status:
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU:
        return "timeout"
    return "killed" if code < 0 else "crashed"


def _parse(lines: bytes) -> list[dict[str, JsonValue]]:
    results = []
    for line in lines.splitlines():
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            break  # cut short, or not ours
        if not isinstance(result, dict):
            break
        results.append(result)
    return results
