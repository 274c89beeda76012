"""`deltawire run JOB`: the whole loop on this machine, every service a process of its own."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Protocol, Self, TypeVar

from pydantic import BaseModel
from rich.console import Console

from deltawire.cli.children import Child, stop_all
from deltawire.cli.live import LiveView
from deltawire.cli.local_redis import LocalRedis, local_redis
from deltawire.cli.local_run import findable
from deltawire.cli.observation import Observation
from deltawire.cli.plain import QUIET_S, PlainView
from deltawire.cli.plan import (
    ENVIRONMENT,
    TRAINER,
    RunOptions,
    RunPlan,
    make_plan,
    service_children,
)
from deltawire.cli.report import print_report
from deltawire.cli.summary import RunSummary, draw_reward, summarise, write_summary
from deltawire.control.client import ServiceClient
from deltawire.job.spec import JobSpec
from deltawire.protocol.control import EnvironmentStatus, ReplicaStatus, TrainerStatus
from deltawire.protocol.errors import DeltawireError, RemoteError

_READY_S = 300.0
_VLLM_READY_S = 1200.0
"""It loads, compiles and captures before it answers; its own deadline is 900 s."""
_LOOK_EVERY_S = 1.0
_SETTLE_S = 30.0
"""After the trainer finished, replicas get this long to report its version."""

Status = TypeVar("Status", bound=BaseModel)


class View(Protocol):
    """Where a run is shown."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, seen: Observation, *, last: bool = False) -> None: ...
    def say(self, line: str) -> None: ...


def run_job(options: RunOptions, spec: JobSpec, *, plain: bool) -> int:
    """Run to the end. 0: finished, every replica equal to the trainer, no rollout lost."""
    plan = make_plan(options, spec, run_id=time.strftime("%Y%m%d-%H%M%S"))
    console = Console()
    view: View = PlainView() if plain or not console.is_terminal else LiveView(console)
    _point_latest(plan.folder)
    try:
        summary, stopped_by = _run_until_told(plan, view)
    except DeltawireError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if summary is None:
        sys.stderr.write(f"stopped; logs in {plan.logs}\n")
        return 128 + stopped_by
    return print_report(summary, console)


def _run_until_told(plan: RunPlan, view: View) -> tuple[RunSummary | None, int]:
    """The summary, or None and the signal that ended the run before its end."""
    told: list[int] = []
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        main = loop.create_task(_run(plan, view))

        def stop(number: int) -> None:
            told.append(number)
            main.cancel()

        # Both alike, and Ctrl-C also where the shell that started this ignored it for us.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            return runner.run(_awaited(main)), 0
        except asyncio.CancelledError:
            return None, told[0] if told else signal.SIGTERM


async def _awaited(task: "asyncio.Task[RunSummary]") -> RunSummary:
    return await task


def _point_latest(folder: Path) -> None:
    link = folder.parent / "latest"
    partial = folder.parent / f".latest-{os.getpid()}"
    with contextlib.suppress(OSError):  # a file system without links: only the shortcut is missing
        partial.symlink_to(folder.name)
        partial.replace(link)


async def _run(plan: RunPlan, view: View) -> RunSummary:
    started = time.monotonic()
    with view, contextlib.ExitStack() as stack:
        redis = None
        if plan.options.streams is None:
            view.say("starting redis")
            redis = stack.enter_context(local_redis(plan.folder / "redis"))
        streams = plan.options.streams or (redis.url if redis else "")
        children = service_children(plan, streams=streams)
        urls = {child.name: child.url for child in children}
        stack.enter_context(findable(plan.folder, urls, plan.token))
        try:
            await _start(children, view)
            seen = await _watch(plan, children, redis, view)
        finally:
            await stop_all(list(reversed(children)))
    restarts = {child.name: child.restarts for child in children if child.restarts}
    if redis is not None and redis.restarts:
        restarts[redis.name] = redis.restarts
    summary = _summarise(plan, seen, restarts, time.monotonic() - started)
    await asyncio.to_thread(write_summary, summary, plan.folder)
    await asyncio.to_thread(draw_reward, summary, plan.folder / "reward.png")
    return summary


async def _start(children: list[Child], view: View) -> None:
    for child in children:
        view.say(f"starting {child.name} at {child.url}")
        await child.start()
    for child in children:
        await _until_ready(child, view)
        view.say(f"{child.name} is ready")


async def _until_ready(child: Child, view: View) -> None:
    """Wait, and say so every now and then. Raises ChildDied."""
    slow = child.environ.get("INFERENCE_ENGINE") == "vllm"
    waiting = asyncio.create_task(child.wait_ready(_VLLM_READY_S if slow else _READY_S))
    try:
        while not (await asyncio.wait({waiting}, timeout=QUIET_S))[0]:
            view.say(f"waiting for {child.name} to be ready; its log: {child.log_path}")
        waiting.result()
    finally:
        waiting.cancel()


async def _watch(
    plan: RunPlan, children: list[Child], redis: LocalRedis | None, view: View
) -> Observation:
    seen = Observation(show=plan.spec.show)
    finished_at: float | None = None
    while True:
        await _revive(children, redis, view)
        await asyncio.gather(*(_look(child, seen) for child in children))
        if seen.trainer is not None and seen.trainer.state == "failed":
            raise DeltawireError(f"the trainer stopped: {seen.trainer.reason}")
        done = seen.trainer is not None and seen.trainer.state == "finished"
        if done and finished_at is None:
            finished_at = time.monotonic()
        settled = done and _all_equal(seen, plan.options.replicas)
        late = finished_at is not None and time.monotonic() - finished_at > _SETTLE_S
        view.show(seen, last=settled or late)
        if settled or late:
            return seen
        await asyncio.sleep(_LOOK_EVERY_S)


async def _revive(children: list[Child], redis: LocalRedis | None, view: View) -> None:
    if redis is not None and await asyncio.to_thread(redis.revive):
        view.say(f"redis died and was started again; its log: {redis.log_path}")
    for child in children:
        if await child.revive():
            view.say(f"{child.name} died and was started again; its log: {child.log_path}")


def _all_equal(seen: Observation, replicas: int) -> bool:
    trainer = seen.trainer
    return (
        trainer is not None
        and len(seen.replicas) == replicas
        and all(
            status.version == trainer.version and status.digest == trainer.digest
            for status in seen.replicas.values()
        )
    )


async def _look(child: Child, seen: Observation) -> None:
    if child.name == TRAINER:
        seen.trainer = await _status(child, TrainerStatus) or seen.trainer
    elif child.name == ENVIRONMENT:
        seen.environment = await _status(child, EnvironmentStatus) or seen.environment
    elif (status := await _status(child, ReplicaStatus)) is not None:
        seen.saw_replica(child.name, status)


async def _status(child: Child, kind: type[Status]) -> Status | None:
    try:
        async with ServiceClient(child.url, token=child.token) as client:
            return await client.status(kind)
    except RemoteError:
        return None  # restarting, or too busy to answer: the next look will tell


def _summarise(
    plan: RunPlan, seen: Observation, restarts: dict[str, int], seconds: float
) -> RunSummary:
    if seen.trainer is None:
        raise DeltawireError("the trainer never answered /status; see its log")
    return summarise(
        seen.trainer,
        [seen.replicas[name] for name in sorted(seen.replicas)],
        pauses=seen.pauses_ms(),
        show=plan.spec.show,
        seconds=seconds,
        restarts=restarts,
        paths={
            "bucket": plan.store,
            "rollouts": str(plan.folder / "rollouts"),
            "logs": str(plan.logs),
            "summary": str(plan.folder / "summary.json"),
            "reward curve": str(plan.folder / "reward.png"),
        },
    )
