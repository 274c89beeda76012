"""The trainer as its REST face sees it: one object from the first second to the last.

Opening a run takes a while (model, chain, checkpoint), and a run may fail to open at all; /status
answers through all of it.
"""

import time
from itertools import pairwise
from statistics import median

from deltawire.job.spec import JobSpec
from deltawire.protocol.control import SetAside, StepRecord, TrainerState, TrainerStatus
from deltawire.protocol.versions import BASE_VERSION
from deltawire.store.base import Store
from deltawire_trainer.events import EventHub
from deltawire_trainer.loop import TrainingLoop
from deltawire_trainer.rollout_log import RolloutLog

_PACE_STEPS = 8
"""Steps over which the pace for the time left is measured."""


class NotOpen(Exception):
    """The run is not open yet, could not be opened, or failed: ask again."""


class Trainer:
    """Opens a run, trains it, and says how it goes."""

    def __init__(
        self,
        *,
        run_id: str,
        job: JobSpec,
        model: str,
        store: Store,
        events: EventHub,
        rollouts: RolloutLog,
    ) -> None:
        self.job, self.events, self.rollouts = job, events, rollouts
        self._run_id, self._model, self._store = run_id, model, store
        self._loop: TrainingLoop | None = None
        self._failure = ""
        self._started_at = time.time()

    async def run(self, loop: TrainingLoop) -> None:
        """Train to the end; what ends it early stays visible in the status."""
        self._loop = loop
        await loop.run()

    @property
    def failure(self) -> str:
        """Why the run failed; empty when it did not."""
        return self._failure

    def fail(self, reason: str) -> None:
        """The run could not be opened, or ended early."""
        self._failure = reason
        self.events.publish("state", {"state": "failed", "reason": reason})

    @property
    def state(self) -> TrainerState:
        """Where it stands."""
        if self._failure:
            return "failed"
        return self._loop.state if self._loop else "starting"

    def unready(self) -> str:
        """Why producers cannot work with it yet; "" when they can."""
        if self._failure:
            return self._failure
        return "the run is being opened" if self.state == "starting" else ""

    async def status(self) -> TrainerStatus:
        """GET /status."""
        loop = self._loop
        status = TrainerStatus(
            run_id=self._run_id,
            job=self.job.name,
            model=self._model,
            state=self.state,
            reason=self._failure,
            step=0,
            steps=self.job.train.steps,
            version=BASE_VERSION,
            store=self._store.uri,
            started_at=self._started_at,
            store_budget=self._store.budget().as_numbers(),
        )
        return status if loop is None else status.model_copy(update=await self._progress(loop))

    async def _progress(self, loop: TrainingLoop) -> dict[str, object]:
        """What an open run adds to the status."""
        return {
            "reason": self._failure or loop.reason,
            "step": loop.step,
            "version": loop.publishing.publisher.version,
            "digest": loop.publishing.publisher.digest,
            "groups": loop.ledger.counts(),
            "dead_letters": [
                SetAside(id=letter.id, reason=letter.reason) for letter in loop.feeder.dead_letters
            ],
            "history": list(loop.history),
            "evals": list(loop.evaluation.results),
            "rollouts_held": loop.feeder.intake.rollouts_held,
            "rollouts_per_step": self.job.train.groups_per_step * self.job.train.group_size,
            **_errors(loop),
            "replicas": await loop.publishing.replicas(),
            "waits_for": loop.waits_for,
            "memory": loop.memory,
            "eta_s": seconds_left(loop.history, loop.step, self.job.train.steps),
        }

    def opened(self) -> TrainingLoop:
        """The loop, for routes that look at it. Raises while there is none."""
        if self._loop is None:
            raise NotOpen(self._failure or "the run is still being opened; try again soon")
        return self._loop

    def running(self) -> TrainingLoop:
        """The loop, for routes that act on it. Raises while there is none, or when it failed."""
        if self._failure:
            raise NotOpen(self._failure)
        return self.opened()


def _errors(loop: TrainingLoop) -> dict[str, object]:
    """Of all steps, and of groups dropped since the last one."""
    pending = loop.feeder.intake.errors
    worst = max(loop.history, key=lambda step: step.errors, default=None)
    return {
        "errors_total": sum(step.errors for step in loop.history) + pending.total,
        "error_reason": pending.reason or (worst.error_reason if worst else ""),
    }


def seconds_left(history: list[StepRecord], step: int, steps: int) -> float | None:
    """At the median pace of the last steps; None before there is one."""
    recent = history[-_PACE_STEPS:]
    if len(recent) < 2:
        return None
    paces = [b.finished_at - a.finished_at for a, b in pairwise(recent)]
    return max(0.0, median(paces)) * max(0, steps - step)
