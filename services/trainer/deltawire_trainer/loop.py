"""The story of a run: wait for groups, train, publish beside the next step, end cleanly.

    resume -> [ wait -> train -> diff -> (encode -> upload -> commit -> announce) ]* -> finish

Training waits for `wait`, its own forward, backward and update, and `diff`. The sync phases, the
checkpoint and the reading of the streams go on beside it. Masters change only between `apply` and
`diff`, under `_weights`; a checkpoint is written while they stand still.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from deltawire.protocol.control import StepRecord, SyncRecord, TrainerState, WeightNotice
from deltawire.protocol.errors import (
    DeltawireError,
    StoreUnavailable,
    StreamError,
    StreamUnavailable,
)
from deltawire.service.metrics import Metrics
from deltawire.sync.publisher import PendingDelta
from deltawire_trainer.account import step_record
from deltawire_trainer.checkpointing import Checkpointing
from deltawire_trainer.evaluation import Evaluation
from deltawire_trainer.events import EventHub
from deltawire_trainer.feeder import Feeder, Position
from deltawire_trainer.guard import Guard, GuardStopped, Signals
from deltawire_trainer.intake import UsableGroup
from deltawire_trainer.journal import Evaluated, RolledBack, Stopped, Synced, Trained
from deltawire_trainer.ledger import Ledger
from deltawire_trainer.memory import training_memory
from deltawire_trainer.opening import OpenRun
from deltawire_trainer.publishing import Publishing
from deltawire_trainer.resume import adopt_head, last_published
from deltawire_trainer.rollout_log import RolloutLog
from deltawire_trainer.samples import TrainingSample, Weighing, batch_samples

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_SYNC_PHASES = ("diff", "encode", "upload", "commit", "announce")
_PATIENCE_S = 1.0
"""How often a waiting loop looks whether it was stopped or paused."""
_LAST_TRIES = 5
"""Attempts to publish the last version before the run ends without it."""


class TrainingLoop:
    """One run, from its newest checkpoint to its end. Owned by one event loop."""

    def __init__(
        self,
        run: OpenRun,
        *,
        feeder: Feeder,
        ledger: Ledger,
        publishing: Publishing,
        checkpointing: Checkpointing,
        evaluation: Evaluation,
        guard: Guard,
        events: EventHub,
        rollouts: RolloutLog,
        metrics: Metrics,
        threads: int,
        converge_timeout_s: float,
        last_eval_s: float,
    ) -> None:
        self.job, self.step, self.version = run.job, run.step, int(run.publisher.version)
        self.ledger, self.feeder, self.publishing = ledger, feeder, publishing
        self.evaluation, self.events, self.rollouts = evaluation, events, rollouts
        self._metrics = metrics
        self.memory = training_memory(run.policy)
        self.history: list[StepRecord] = []
        self.state: TrainerState = "starting"
        self.reason = ""
        self.waits_for = ""
        self._run, self._guard, self._checkpointing = run, guard, checkpointing
        self._converge_timeout_s, self._last_eval_s = converge_timeout_s, last_eval_s
        self._steps_since_sync = 0
        self._evaluated = self.version if run.recovered.steps or run.took_over else -1
        """No version up to this one is still to be evaluated."""
        self._stop_reason = run.recovered.stop_reason
        self._guard_says = ""
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._weights = asyncio.Lock()
        self._compute_thread = ThreadPoolExecutor(
            1, thread_name_prefix="train", initializer=torch.set_num_threads, initargs=(threads,)
        )

    # -- the story --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the end. Raises what ends the run early; the state says so too."""
        feeding: asyncio.Task[None] | None = None
        try:
            await self._resume()
            self._stand(in_flight=0)
            feeding = asyncio.create_task(self.feeder.run())
            while self.step < self.job.train.steps and not self._stop_reason:
                groups, wait_s = await self._wait_for_groups(feeding)
                if groups:
                    await self._train(groups, wait_s=wait_s)
            await self._finish(feeding)
        except DeltawireError as error:
            self._enter("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            await self._quiet(feeding)

    def pause(self) -> None:
        """Hold before the next step; tickets are not issued meanwhile."""
        self._unpaused.clear()
        self.feeder.paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self.feeder.paused = False
        self._unpaused.set()

    def stop(self, reason: str) -> None:
        """End the run after the step in flight, as if it were the last one.

        On disk when this returns: a process that goes on with the run trains no more.
        """
        if self.state in ("finished", "failed"):
            return
        if reason != self._stop_reason:
            self._run.journal.append(Stopped(reason=reason))
        self._end_early(reason)

    async def sync_now(self) -> WeightNotice | None:
        """Publish what is not yet published; coordinates of the newest version. Raises
        StoreUnavailable when it did not reach the bucket."""
        async with self._weights:
            await self.publishing.settled()
            if self._steps_since_sync or self.publishing.failed:
                await self._start_sync()
            await self.publishing.settled()
        if self.publishing.failed:
            raise StoreUnavailable(f"version {self.version} did not reach the bucket; ask again")
        return self.publishing.notice()

    # -- waiting ----------------------------------------------------------------------------------

    async def _wait_for_groups(
        self, feeding: asyncio.Task[None]
    ) -> tuple[list[UsableGroup], float]:
        """The next step's groups and the seconds it took; none when the run was stopped."""
        started = time.perf_counter()
        while not self._stop_reason:
            if not self._unpaused.is_set():
                self._enter("paused")
                await self._unpaused.wait()
            self._enter("waiting")
            self.waits_for = "streams" if self.feeder.away else "rollouts"
            groups = await self.feeder.batch(timeout_s=_PATIENCE_S)
            if groups:
                return groups, time.perf_counter() - started
            if feeding.done():
                feeding.result()
            await self._publish_again()
        return [], 0.0

    async def _publish_again(self) -> None:
        """A version that failed to reach the bucket would leave producers waiting for it. Raises
        what made publishing end: Fenced, or an error that nobody expected."""
        if self.publishing.busy:
            return
        await self.publishing.settled()
        if self.publishing.failed:
            async with self._weights:
                await self._start_sync()

    # -- one step ---------------------------------------------------------------------------------

    async def _train(self, groups: list[UsableGroup], *, wait_s: float) -> None:
        """One optimizer step, and its version on the way."""
        self._enter("training")
        self.waits_for = ""
        self._stand(in_flight=1, taken=len(groups))
        live_version = self.version
        samples = self._samples(groups)
        async with self._weights:
            record = await self._learn(groups, samples, live_version=live_version, wait_s=wait_s)
            self._run.journal.append(
                Trained(
                    record=record,
                    live_version=live_version,
                    groups={g.group.group_id: list(g.keep) for g in groups},
                )
            )
            # Without an await in between: the feeder must never see one without the other.
            self.ledger.train([g.group.group_id for g in groups], step=record.step)
            self._steps_since_sync += 1
            self._stand(in_flight=0)
            self._remember(record)
            self.rollouts.record(record.step, [g.group for g in groups])
            if self._steps_since_sync >= self.job.sync.sync_every:
                await self._start_sync()
            self._stand(in_flight=0)
            self._checkpointing.start_if_due(step=self.step, version=self.version)
        self._heed_guard(record)

    async def _learn(
        self,
        groups: Sequence[UsableGroup],
        samples: list[TrainingSample],
        *,
        live_version: int,
        wait_s: float,
    ) -> StepRecord:
        """Forward, backward, update; the record of the step."""
        learner = self._run.learner
        gradient = await self._compute(learner.accumulate, samples, live_version=live_version)
        await self._checkpointing.settled()
        update = await self._compute(learner.apply, gradient, step=self.step)
        self.step += 1
        errors = self.feeder.intake.take_errors()
        errors.add(rollout for usable in groups for rollout in usable.group.rollouts)
        syncs = self._steps_since_sync + 1 >= self.job.sync.sync_every
        return step_record(
            step=self.step,
            version=live_version + int(syncs),
            live_version=live_version,
            groups=len(groups),
            rollouts=[rollout for usable in groups for rollout in usable.rollouts],
            samples=samples,
            gradient=gradient,
            update=update,
            errors=errors,
            wait_s=wait_s,
            finished_at=time.time(),
        )

    def _samples(self, groups: Sequence[UsableGroup]) -> list[TrainingSample]:
        spec = self.job.train
        return batch_samples(
            [(usable.group.group_id, usable.rollouts) for usable in groups],
            Weighing.of(spec),
            agents=spec.agents,
        )

    async def _start_sync(self) -> None:
        """Take the diff, which training waits for, and leave the rest to run beside it."""
        await self.publishing.settled()
        await self._end_evaluation()
        pending = await self._diff()
        self.version, self._steps_since_sync = int(pending.version), 0
        step = self.step

        async def committed(record: SyncRecord) -> None:
            self._run.journal.append(Synced(step=step, record=record))
            self._note_sync(step, record)
            await self._open_evaluation(int(record.version), step=step)

        self.publishing.start(pending, committed)

    async def _diff(self) -> PendingDelta:
        """What the newest committed version does not have yet."""
        publisher, weights = self._run.publisher, self._run.policy.working
        return await self._when_store_answers(
            lambda: self._compute(publisher.diff, weights.items())
        )

    @property
    def _next_evaluation(self) -> int | None:
        """The version whose evaluation comes next, or is open; None without evaluations."""
        if self.job.eval is None:
            return None
        every = self.job.eval.every
        return (self._evaluated // every + 1) * every

    async def _open_evaluation(self, version: int, *, step: int) -> None:
        """Order a round for this version when one is due."""
        if self.job.eval is None or version % self.job.eval.every:
            return
        tickets = self.feeder.evaluation_tickets(version)
        self.evaluation.open(version, tickets, step=step)
        try:
            await self.feeder.issue_evaluation(tickets)
        except StreamError as error:
            self.evaluation.close()
            log.warning("evaluation not ordered", extra={"reason": str(error)})

    async def _end_evaluation(self, *, limit_s: float | None = None) -> None:
        """Wait for the open round, if there is one, for as long as it may take; sum it up."""
        self.waits_for = self.evaluation.waits_for
        await self.evaluation.hold(limit_s=limit_s)
        self.waits_for = ""
        result = self.evaluation.close()
        self._evaluated = self.version
        if result is not None:
            self._run.journal.append(Evaluated(record=result))
            self.events.publish("eval", result)

    def _end_early(self, reason: str) -> None:
        self._stop_reason = reason
        self.resume()

    def _heed_guard(self, record: StepRecord) -> None:
        verdict = self._guard.observe(
            Signals(
                loss=record.loss,
                grad_norm=record.grad_norm,
                ess=record.ess,
                mismatch_kl=record.mismatch_kl,
            )
        )
        if verdict.action == "stop":
            self._guard_says = verdict.reason
            self._end_early(f"guard: {verdict.reason}")
        elif verdict.action != "ok":
            log.warning("guard", extra={"action": verdict.action, "reason": verdict.reason})

    # -- beginning and end ------------------------------------------------------------------------

    async def _resume(self) -> None:
        """Reach the state of the last process (see resume.py), or begin."""
        run, recovered = self._run, self._run.recovered
        await self._when_streams_answer(self.feeder.intake.drain)
        for made in recovered.after(self.step):
            groups = self.feeder.intake.recorded(made.groups)
            if not groups:
                break
            await self._make_again(made, groups)
        given_up = bool(recovered.steps) and self.step < max(recovered.steps)
        if given_up:
            await self._give_up_redo()
        self.history = recovered.history(self.step)
        if run.took_over or given_up:
            await self._checkpointing.write(step=self.step, version=self.version)
        if recovered.steps:
            await self._publish_what_differs()
        elif not run.took_over:
            await self._open_evaluation(self.version, step=self.step)

    async def _publish_what_differs(self) -> None:
        """A crash may have come between a step and its commit. Weights that were published already
        (the usual case: the steps made again ended in the same bits) are not published twice."""
        publisher = self._run.publisher
        pending = await self._diff()
        publisher.discard(pending)
        expected = max((record.version for record in self.history), default=0)
        if pending.changed or publisher.version < expected:
            await self._start_sync()

    async def _make_again(self, made: Trained, groups: list[UsableGroup]) -> None:
        """A step that the journal has and the checkpoint does not."""
        log.info("step made again", extra={"step": made.record.step})
        learner = self._run.learner
        gradient = await self._compute(
            learner.accumulate, self._samples(groups), live_version=made.live_version
        )
        await self._compute(learner.apply, gradient, step=self.step)
        self.step += 1
        self.ledger.train(made.groups, step=self.step)
        self.rollouts.record(self.step, [usable.group for usable in groups])

    async def _give_up_redo(self) -> None:
        """Some groups are gone: go on from the published head, or from here if it is no newer."""
        run, steps = self._run, self._run.recovered.steps
        published = last_published(steps.values(), version=int(run.publisher.version))
        if published > self.step:
            await self._compute(adopt_head, run.publisher, run.policy)
            for step in range(self.step + 1, published + 1):
                self.ledger.train(steps[step].groups, step=step)
                self.feeder.intake.settle(steps[step].groups)
            self.step = published
        run.journal.append(RolledBack(step=self.step))
        log.warning("steps rolled back", extra={"to": self.step})

    async def _finish(self, feeding: asyncio.Task[None]) -> None:
        """Last version committed and evaluated, every ticket accounted for, final anchor, replicas
        told."""
        self.feeder.closing = True
        async with self._weights:
            await self._publish_last()
        await self._end_evaluation(limit_s=self._last_eval_s)
        await self._end_feeding(feeding)
        async with self._weights:
            await self._when_streams_answer(self.feeder.wind_up)
            await self._checkpointing.settled()
            await self._checkpointing.write(step=self.step, version=self.version)
            await self._when_store_answers(lambda: asyncio.to_thread(self._run.publisher.finish))
        self.ledger.close()
        await self._wait_for_replicas()
        if self._guard_says:
            raise GuardStopped(self._guard_says)
        self._enter("finished", self._stop_reason)

    async def _publish_last(self) -> None:
        for attempt in range(_LAST_TRIES):
            await self.publishing.settled()
            if not (self._steps_since_sync or self.publishing.failed):
                return
            await asyncio.sleep(attempt)
            await self._start_sync()
        await self.publishing.settled()

    async def _wait_for_replicas(self) -> None:
        """Give the registered replicas time to reach the last version."""
        self.waits_for = "replicas"
        give_up_at = time.monotonic() + self._converge_timeout_s
        while time.monotonic() < give_up_at:
            replicas = await self.publishing.replicas()
            if all(r.version == self._run.publisher.version for r in replicas):
                break
            await asyncio.sleep(_PATIENCE_S / 2)
        self.waits_for = ""

    async def _quiet(self, feeding: asyncio.Task[None] | None) -> None:
        """Leave nothing running: what was on its way to the bucket or the disk arrives."""
        self._run.learner.interrupt.set()
        self._compute_thread.shutdown(wait=False, cancel_futures=True)
        if feeding is not None:
            await self._end_feeding(feeding)
        tasks = (self.publishing.task, self._checkpointing.task)
        left = {task for task in tasks if task is not None}
        if left:
            await asyncio.wait(left)

    async def _end_feeding(self, feeding: asyncio.Task[None]) -> None:
        self.feeder.halt()
        feeding.cancel()
        await asyncio.wait({feeding})

    # -- small things -----------------------------------------------------------------------------

    async def _compute(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the one thread that touches weights."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compute_thread, lambda: work(*args, **kwargs))

    async def _when_streams_answer(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something the run cannot go on without, however long the streams are away."""
        while True:
            try:
                await work()
                return
            except StreamUnavailable as error:
                self.waits_for = "streams"
                log.warning("streams away", extra={"reason": str(error)})
                await asyncio.sleep(_PATIENCE_S)

    async def _when_store_answers(self, work: Callable[[], Awaitable[R]]) -> R:
        """Do something that goes on only once it is known what became of the last commit, however
        long the bucket is away."""
        while True:
            try:
                return await work()
            except StoreUnavailable as error:
                self.waits_for = "store"
                log.warning("store away", extra={"reason": str(error)})
                await asyncio.sleep(_PATIENCE_S)

    def _stand(self, *, in_flight: int, taken: int = 0) -> None:
        self.feeder.stand_at(
            Position(
                live_version=self.version,
                steps_since_sync=self._steps_since_sync,
                in_flight=in_flight,
                steps_left=max(0, self.job.train.steps - self.step - in_flight),
                newest_start=self._next_evaluation,
            ),
            taken=taken,
        )

    def _enter(self, state: TrainerState, reason: str = "") -> None:
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self.events.publish("state", {"state": state, "reason": reason})

    def _remember(self, record: StepRecord) -> None:
        self.history.append(record)
        self._count(record)
        self.events.publish("step", record)
        log.info(
            "step",
            extra={
                "step": record.step,
                "reward": record.reward,
                "staleness": record.staleness,
                "tokens": record.tokens,
                **{f"{name}_s": seconds for name, seconds in record.phases_s.items()},
            },
        )

    def _count(self, record: StepRecord) -> None:
        for name in ("step", "reward", "staleness", "ess", "mismatch_kl", "loss", "grad_norm"):
            self._metrics.set(name, float(getattr(record, name)))
        self._metrics.count("tokens", record.tokens)
        self._metrics.count("rollouts", record.rollouts)
        for phase, seconds in record.phases_s.items():
            self._metrics.observe(phase, seconds)
        self._metrics.set("duplicates", float(self.feeder.intake.duplicates))

    def _note_sync(self, step: int, record: SyncRecord) -> None:
        """Add a sync to the record of the step whose weights it carries."""
        self._metrics.set("version", float(record.version))
        self._metrics.set("density", record.density)
        self._metrics.count("delta_bytes", record.bytes)
        for phase in _SYNC_PHASES:
            self._metrics.observe(phase, float(getattr(record, f"{phase}_s")))
        for index in range(len(self.history) - 1, -1, -1):
            made = self.history[index]
            if made.step == step:
                phases = {name: float(getattr(record, f"{name}_s")) for name in _SYNC_PHASES}
                self.history[index] = made.model_copy(
                    update={
                        "version": record.version,
                        "sync": record,
                        "phases_s": {**made.phases_s, **phases},
                    }
                )
                break
        self.events.publish("sync", record)
