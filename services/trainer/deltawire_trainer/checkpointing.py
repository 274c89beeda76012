"""Checkpoints beside training: written while the masters stand still, acked when complete.

A group is acked only here, once a checkpoint contains it. Until then the streams keep it and the
journal says which step used it, so a rare checkpoint costs backlog and not safety.
"""

import asyncio
import logging
import time

from deltawire.protocol.errors import StreamError
from deltawire_trainer.checkpoints import Checkpoints
from deltawire_trainer.intake import Intake
from deltawire_trainer.learner import Learner

log = logging.getLogger(__name__)


class Checkpointing:
    """At most one checkpoint is being written. Masters may change only after `settled`."""

    def __init__(
        self, checkpoints: Checkpoints, learner: Learner, intake: Intake, *, run_id: str, every: int
    ) -> None:
        self._checkpoints, self._learner, self._intake = checkpoints, learner, intake
        self._run_id, self._every = run_id, every
        self.task: asyncio.Task[None] | None = None
        self._written = -1

    def start_if_due(self, *, step: int, version: int) -> None:
        """Begin one every so many steps."""
        if step % self._every == 0 and (self.task is None or self.task.done()):
            # Asked now: when the task first runs, the next step may have taken its groups already.
            contained = self._intake.trained_entries()
            self.task = asyncio.create_task(
                self._write(step=step, version=version, contained=contained)
            )

    async def settled(self) -> None:
        """Return when none is being written. Raises StoreError when the last one failed."""
        if self.task is not None:
            await self.task
            self.task = None

    async def write(self, *, step: int, version: int) -> None:
        """Write one now, then ack what it contains."""
        await self._write(step=step, version=version, contained=self._intake.trained_entries())

    async def _write(self, *, step: int, version: int, contained: list[str]) -> None:
        if step != self._written:
            await self._write_down(step=step, version=version)
        try:
            await self._intake.ack_trained(contained)
        except StreamError as error:
            # They stay un-acked and go with the next checkpoint.
            log.warning("groups not acked yet", extra={"step": step, "reason": str(error)})

    async def _write_down(self, *, step: int, version: int) -> None:
        started = time.perf_counter()
        await asyncio.to_thread(
            self._checkpoints.write,
            run_id=self._run_id,
            step=step,
            version=version,
            policy=self._learner.policy,
            optimizer=self._learner.optimizer,
        )
        self._written = step
        log.info("checkpoint written", extra={"step": step, "s": time.perf_counter() - started})
