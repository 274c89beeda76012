"""A run under faults: start everything, break it, let it end, look at what is left."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis, RedisError

from deltawire.control.client import ServiceClient
from deltawire.protocol import topics
from deltawire.protocol.control import STOP, ReplicaStatus, TrainerStatus
from deltawire.protocol.errors import RemoteError
from deltawire_trainer.app import Acknowledged

from .evidence import Account, Bucket, recorded_groups
from .faults import Fault
from .parties import RUN_ID, Parties, assemble
from .processes import Nursery, OwnEnd, Supervisor

_LOOK_S = 0.2
_READY_S = 300.0
_COMES_BACK_S = 300.0
"""Longest time after which something that was broken must work again."""
_ENDS_S = 300.0
_AT_ONCE = 6
"""Faults that may be felt at the same time; on a slow machine the next one waits."""
_STEPS_AFTER = 4
"""Steps that the run must make after the last fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One fault and how long it was felt."""

    fault: Fault
    recovery_s: float


@dataclass(slots=True)
class Pulse:
    """The run's steps, as its journal grows."""

    journal: Path
    steps: int = 0
    at: float = 0.0
    """When the newest step was seen."""
    longest_s: float = 0.0
    """Longest time between two steps."""
    _read: int = 0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_S)

    def _look(self) -> None:
        if not self.journal.exists():
            return
        with self.journal.open("rb") as file:
            file.seek(self._read)
            grown = file.read()
        whole = grown[: grown.rfind(b"\n") + 1]
        self._read += len(whole)
        new = whole.count(b'{"kind":"trained"')
        if new:
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self.at if self.at else 0.0)
            self.steps, self.at = self.steps + new, now


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that is judged."""

    seen: list[Seen]
    trainer: TrainerStatus
    replicas: dict[str, ReplicaStatus]
    account: Account
    rollout_files: dict[int, set[str]]
    acknowledged: set[str]
    bucket: Bucket
    left_in_redis: dict[str, int]
    own_ends: list[OwnEnd]
    exit_codes: dict[str, int | None]
    longest_stall_s: float
    wall_s: float


@dataclass(slots=True)
class Storm:
    """One run under faults."""

    parties: Parties
    faults: list[Fault]
    say: Callable[[str], None]
    nursery: Nursery = field(default_factory=Nursery)
    supervisor: Supervisor = field(init=False)
    pulse: Pulse = field(init=False)
    seen: list[Seen] = field(default_factory=list)
    _at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.nursery, dict(self.parties.all), self.parties.redis)
        self.pulse = Pulse(self.parties.plan.folder / "journal.jsonl")

    async def run(self) -> Outcome:
        """Raises TimeoutError, saying what, when something does not come back."""
        began = time.monotonic()
        beside: list[asyncio.Task[None]] = []
        try:
            await self.nursery.open()
            for party in self.parties.all.values():
                await self.nursery.start(party)
            beside = [asyncio.create_task(work.run()) for work in (self.supervisor, self.pulse)]
            await self._all_ready()
            await self._until(lambda: self.pulse.steps >= 1, _READY_S, "the first step")
            self.say(f"first step after {time.monotonic() - began:.0f} s")
            await self._break_things()
            await self._all_ready()
            wanted = self.pulse.steps + _STEPS_AFTER
            await self._until(lambda: self.pulse.steps >= wanted, _COMES_BACK_S, "further steps")
            trainer, replicas = await self._end()
            left = await asyncio.to_thread(self._left_in_redis)
            self.supervisor.rest()
            await self._stop()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self._sweep()
        return await asyncio.to_thread(
            self._outcome, trainer, replicas, left, time.monotonic() - began
        )

    # -- faults -----------------------------------------------------------------------------------

    async def _break_things(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, fault in enumerate(self.faults, 1):
                self.say(
                    f"{number}/{len(self.faults)} {fault.how} {fault.target}, "
                    f"{self.pulse.steps} steps"
                )
                await self._at_once.acquire()
                group.create_task(self._commit(fault)).add_done_callback(
                    lambda _: self._at_once.release()
                )
                await asyncio.sleep(fault.then_s)

    async def _commit(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                back = self._back(fault.target, killed=True)
                self.supervisor.who(fault.target).signal(signal.SIGKILL)
            case "stop":
                party = self.supervisor.who(fault.target)
                pid = party.pid
                party.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.lasts_s)
                back = self._back(fault.target, killed=False)
                if party.pid == pid:
                    party.signal(signal.SIGCONT)
            case _:
                with self.parties.wires[fault.target].cut(fault.how):  # type: ignore[arg-type]
                    await asyncio.sleep(fault.lasts_s)
                back = self._back("trainer", killed=False)
        began = time.monotonic()
        await self._until(back, _COMES_BACK_S, f"{fault.target} after {fault.how}")
        self.seen.append(Seen(fault=fault, recovery_s=time.monotonic() - began))

    def _back(self, target: str, *, killed: bool) -> Callable[[], Awaitable[bool] | bool]:
        """Whether a target does its work again, from now on."""
        now, supervisor = time.monotonic(), self.supervisor

        def again() -> bool:
            return not killed or supervisor.started_at.get(target, 0.0) > now

        async def is_ready() -> bool:
            return again() and await supervisor.ready(target)

        async def redis_answers() -> bool:
            return again() and await asyncio.to_thread(self._ping)

        if target == "trainer":
            return lambda: again() and self.pulse.at > now
        if target == "producer":
            witness = self.parties.wires["producer-redis"].witness
            heard = witness.answers
            return lambda: again() and witness.answers > heard
        return redis_answers if target == "redis" else is_ready

    # -- the end ----------------------------------------------------------------------------------

    async def _end(self) -> tuple[TrainerStatus, dict[str, ReplicaStatus]]:
        """Stop the run as a person would, and wait until everybody has its last version."""
        self.supervisor.let_end("producer")  # it ends by itself when the run is finished
        trainer = self.parties.all["trainer"]
        async with ServiceClient(trainer.url, token=trainer.token) as client:
            await client.post(STOP, Acknowledged)
            found: dict[str, TrainerStatus] = {}

            async def finished() -> bool:
                found["trainer"] = await client.status(TrainerStatus)
                return found["trainer"].state in ("finished", "failed")

            await self._until(finished, _ENDS_S, "the end of the run")
        status = found["trainer"]
        replicas: dict[str, ReplicaStatus] = {}

        async def equal() -> bool:
            for name in ("replica-0", "replica-1"):
                party = self.parties.all[name]
                async with ServiceClient(party.url, token=party.token) as client:
                    replicas[name] = await client.status(ReplicaStatus)
            return all(r.version == status.version for r in replicas.values())

        await self._until(equal, _ENDS_S, "the last version on all replicas")
        producer = self.parties.all["producer"]
        await self._until(lambda: producer.code is not None, _ENDS_S, "the producer's end")
        return status, replicas

    def _outcome(
        self,
        trainer: TrainerStatus,
        replicas: dict[str, ReplicaStatus],
        left: dict[str, int],
        wall_s: float,
    ) -> Outcome:
        plan = self.parties.plan
        return Outcome(
            seen=self.seen,
            trainer=trainer,
            replicas=replicas,
            account=Account.read(plan.folder / "journal.jsonl"),
            rollout_files=recorded_groups(plan.folder / "rollouts"),
            acknowledged=self.parties.acknowledged,
            bucket=Bucket.read(plan.store, RUN_ID, plan.folder / "cache" / "stranger"),
            left_in_redis=left,
            own_ends=self.supervisor.own_ends,
            exit_codes={name: party.code for name, party in self.parties.all.items()},
            longest_stall_s=self.pulse.longest_s,
            wall_s=wall_s,
        )

    def _left_in_redis(self) -> dict[str, int]:
        """Entries and ids that are still there."""
        with Redis.from_url(self.parties.redis.server.url) as client:
            return {
                "tickets": int(client.xlen(topics.tickets_stream(RUN_ID))),
                "groups": int(client.xlen(topics.groups_stream(RUN_ID))),
            }

    async def _stop(self) -> None:
        """As a supervisor does: SIGTERM, and a while to end in."""
        everybody = self.parties.all.values()
        for party in everybody:
            party.signal(signal.SIGTERM)
        await self._until(
            lambda: all(party.code is not None for party in everybody), _ENDS_S, "everybody's end"
        )

    async def _sweep(self) -> None:
        """Leave no process and no socket behind, whatever went wrong."""
        await self.nursery.close()
        for wire in self.parties.wires.values():
            await wire.close()
        self.parties.redis.server.kill()

    # -- waiting ----------------------------------------------------------------------------------

    def _ping(self) -> bool:
        try:
            with Redis.from_url(self.parties.redis.server.url, socket_timeout=1.0) as client:
                return bool(client.ping())
        except RedisError:
            return False

    async def _all_ready(self) -> None:
        for name in self.parties.all:
            await self._until(
                lambda name=name: self.supervisor.ready(name),  # type: ignore[misc]
                _READY_S,
                f"{name} to be ready",
            )

    async def _until(
        self, true: Callable[[], Awaitable[bool] | bool], timeout_s: float, what: str
    ) -> None:
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            try:
                answer = true()
                if answer if isinstance(answer, bool) else await answer:
                    return
            except RemoteError:
                pass  # killed meanwhile, or not up yet: asked again
            await asyncio.sleep(_LOOK_S)
        raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")


async def weather(
    folder: Path,
    job_path: Path,
    overrides: list[str],
    faults: list[Fault],
    *,
    lease_s: float,
    rng: random.Random,
    say: Callable[[str], None],
) -> Outcome:
    """Run a job under these faults."""
    parties = await assemble(folder, job_path, overrides, lease_s=lease_s, rng=rng)
    return await Storm(parties, faults, say).run()
