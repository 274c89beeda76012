"""The parties of a run as processes, and a supervisor that starts again what ended."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from deltawire.cli.children import end_with_launcher
from deltawire.control.client import ServiceClient
from deltawire.streams import local_server

_LOOK_S = 0.1
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
_TAIL_BYTES = 3000


@dataclass(slots=True, kw_only=True)
class Party:
    """A process of ours that has a name for as long as the run lasts."""

    name: str
    module: str
    argv: list[str]
    environ: Mapping[str, str]
    log_path: Path
    url: str
    """Empty for the producer, which serves nothing."""
    token: SecretStr
    pid: int = 0
    code: int | None = None
    """Exit code; None while it runs."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it is alive."""
        if self.pid and self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def tail(self) -> str:
        """The end of its log."""
        return self.log_path.read_text(errors="replace")[-_TAIL_BYTES:]


class Nursery:
    """Starts parties as forks of one process (see nursery.py), and hears of their ends."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._orders: deque[asyncio.Future[int]] = deque()
        self._born: dict[int, Party] = {}

    async def open(self) -> None:
        """Returns when everything is imported."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("nursery.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_launcher,
        )
        ready = asyncio.get_running_loop().create_future()
        self._orders.append(ready)
        self._listening = asyncio.create_task(self._listen())
        await ready

    async def start(self, party: Party) -> None:
        """Start or restart."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        order = {
            "module": party.module,
            "argv": party.argv,
            "environ": dict(party.environ),
            "log": str(party.log_path),
        }
        answer = asyncio.get_running_loop().create_future()
        self._orders.append(answer)
        process.stdin.write(json.dumps(order).encode() + b"\n")
        pid = await answer
        party.pid, party.code = pid, None
        self._born[pid] = party

    async def close(self) -> None:
        """End it; its children get SIGKILL from the kernel."""
        if self._process is None or self._listening is None:
            return
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._listening

    async def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            news = json.loads(line)
            if "started" in news:
                self._orders.popleft().set_result(news["started"])
                await asyncio.sleep(0)  # whoever waits for it notes the pid first
            else:
                self._born.pop(news["ended"]).code = news["code"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEnd:
    """A process that ended although nobody had killed it."""

    name: str
    code: int
    tail: str


class RedisParty:
    """Redis beside the others: same folder, port and password after each restart."""

    def __init__(self, folder: Path) -> None:
        self.name = "redis"
        self.server = local_server.start(folder, in_child=end_with_launcher)

    @property
    def pid(self) -> int:
        """Of the server that runs now."""
        return self.server.process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self.server.process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it is alive."""
        if self.code is None:
            self.server.process.send_signal(number)

    async def restart(self) -> None:
        """Start again; returns when it answers."""
        old = self.server
        self.server = await asyncio.to_thread(
            local_server.start,
            old.folder,
            port=old.port,
            password=old.password.get_secret_value(),
            in_child=end_with_launcher,
        )

    def tail(self) -> str:
        """The end of its log."""
        return (self.server.folder / "redis.log").read_text(errors="replace")[-_TAIL_BYTES:]


@dataclass(slots=True)
class Supervisor:
    """Watches everybody. What ended is started again at once."""

    nursery: Nursery
    parties: dict[str, Party]
    redis: RedisParty
    starts: Counter[str] = field(default_factory=Counter)
    """Those after the first."""
    started_at: dict[str, float] = field(default_factory=dict)
    own_ends: list[OwnEnd] = field(default_factory=list)
    _watching: bool = True

    async def run(self) -> None:
        """Until told to rest."""
        while self._watching:
            if self.redis.code is not None:
                self._note(self.redis)
                await self.redis.restart()
                self.started_at[self.redis.name] = time.monotonic()
            for party in list(self.parties.values()):
                if party.code is not None:
                    self._note(party)
                    await self.nursery.start(party)
                    self.started_at[party.name] = time.monotonic()
            await asyncio.sleep(_LOOK_S)

    def let_end(self, name: str) -> None:
        """This one is not started again."""
        del self.parties[name]

    def rest(self) -> None:
        """Start nobody again."""
        self._watching = False

    def who(self, name: str) -> Party | RedisParty:
        """By name."""
        return self.redis if name == self.redis.name else self.parties[name]

    async def ready(self, name: str) -> bool:
        """Whether it says that it can work; of who serves nothing, whether it runs."""
        party = self.parties.get(name)
        if party is None or not party.url:
            return True
        async with ServiceClient(party.url, token=party.token, timeout_s=5.0) as client:
            return await client.unready() == ""

    def _note(self, party: Party | RedisParty) -> None:
        self.starts[party.name] += 1
        code = party.code
        if code is not None and code not in _KILLED:
            self.own_ends.append(OwnEnd(name=party.name, code=code, tail=party.tail()))
