"""Evaluation beside training: held-out episodes pinned to one version, never trained on.

A round is ordered when its version is committed, and comes home over the same streams. The next
version is held back until the round is complete or its time is up (`hold_s`), because a replica
serves one version at a time; training itself goes on meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from deltawire.protocol.control import EvalRecord
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Ticket
from deltawire.protocol.versions import PolicyVersion
from deltawire_trainer.account import rollout_metrics
from deltawire_trainer.errors_seen import ErrorTally

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Round:
    """One evaluation under way."""

    version: int
    step: int
    expected: dict[str, RolloutGroup | None]
    """Ticket id -> its group once it is home."""
    started_at: float
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rollouts(self) -> list[Rollout]:
        """Those that are home."""
        return [
            rollout
            for group in self.expected.values()
            if group is not None
            for rollout in group.rollouts
        ]


class Evaluation:
    """Keeps at most one round open."""

    def __init__(self, *, hold_s: float, past: Iterable[EvalRecord] = ()) -> None:
        """`past`: results of an earlier process of the run."""
        self._hold_s = hold_s
        self._round: Round | None = None
        self._results = {record.version: record for record in past}

    @property
    def results(self) -> list[EvalRecord]:
        """One a version, oldest first."""
        return [record for _, record in sorted(self._results.items())]

    def open(self, version: int, tickets: list[Ticket], *, step: int) -> None:
        """Begin a round with these tickets, for the version that `step` made."""
        self._round = Round(
            version=version,
            step=step,
            expected={ticket.ticket_id: None for ticket in tickets},
            started_at=time.monotonic(),
        )

    def receive(self, group: RolloutGroup) -> None:
        """An evaluation group came home; one of an earlier round, or a second copy, is ignored."""
        current = self._round
        if current is None or group.group_id not in current.expected:
            return
        current.expected[group.group_id] = group
        if all(home is not None for home in current.expected.values()):
            current.complete.set()

    @property
    def waits_for(self) -> str:
        """What a `hold` would wait for; "" when no round is open."""
        return f"evaluation of version {self._round.version}" if self._round else ""

    async def hold(self, *, limit_s: float | None = None) -> None:
        """Return when the open round is complete or its time is up, `hold_s` unless told."""
        current = self._round
        if current is None:
            return
        may_take_s = self._hold_s if limit_s is None else limit_s
        left_s = may_take_s - (time.monotonic() - current.started_at)
        if left_s > 0:
            try:
                async with asyncio.timeout(left_s):
                    await current.complete.wait()
            except TimeoutError:
                log.warning("evaluation incomplete", extra={"version": current.version})

    def close(self) -> EvalRecord | None:
        """End the open round and sum it up; None when there was none."""
        current, self._round = self._round, None
        if current is None:
            return None
        result = summed_up(current)
        self._results[result.version] = result
        return result


def summed_up(current: Round) -> EvalRecord:
    """Mean reward over episodes that were really played at the pinned version."""
    home = current.rollouts
    counted = [rollout for rollout in home if _is_pinned(rollout, current.version)]
    return EvalRecord(
        version=PolicyVersion(current.version),
        step=current.step,
        reward=fmean(rollout.reward for rollout in counted) if counted else None,
        episodes=len(counted),
        finished=len(home),
        expected=len(current.expected),
        metrics=rollout_metrics(counted) if counted else {},
        error_reason=ErrorTally(home).reason,
    )


def _is_pinned(rollout: Rollout, version: int) -> bool:
    return (
        rollout.status != "error"
        and rollout.oldest_version == version
        and rollout.newest_version == version
    )
