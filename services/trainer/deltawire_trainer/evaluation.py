"""Evaluation beside training: held-out episodes pinned to one version, never trained on.

A round is ordered when its version is committed, and comes home over the same streams. The next
version is held back until the round is complete or its time is up (`hold_s`), because a replica
serves one version at a time; training itself goes on meanwhile.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from statistics import fmean

from deltawire.protocol.rollouts import Rollout, RolloutGroup, Ticket
from deltawire_trainer.account import rollout_metrics
from deltawire_trainer.journal import Evaluated

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Round:
    """One evaluation under way."""

    version: int
    expected: dict[str, RolloutGroup | None]
    """Ticket id -> its group once it is home."""
    started_at: float
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Evaluation:
    """Keeps at most one round open."""

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._round: Round | None = None
        self.results: list[Evaluated] = []

    def open(self, version: int, tickets: list[Ticket]) -> None:
        """Begin a round with these tickets."""
        self._round = Round(
            version=version,
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

    async def hold(self) -> None:
        """Return when the open round is complete or its time is up."""
        current = self._round
        if current is None:
            return
        left_s = self._hold_s - (time.monotonic() - current.started_at)
        if left_s > 0:
            try:
                async with asyncio.timeout(left_s):
                    await current.complete.wait()
            except TimeoutError:
                log.warning("evaluation incomplete", extra={"version": current.version})

    def close(self) -> Evaluated | None:
        """End the open round and sum it up; None when there was none or nothing came home."""
        current, self._round = self._round, None
        if current is None:
            return None
        result = summed_up(current)
        if result is not None:
            self.results.append(result)
        return result


def summed_up(current: Round) -> Evaluated | None:
    """Mean reward over episodes that were really played at the pinned version."""
    rollouts = [
        rollout
        for group in current.expected.values()
        if group is not None
        for rollout in group.rollouts
        if _is_pinned(rollout, current.version)
    ]
    if not rollouts:
        return None
    return Evaluated(
        version=current.version,
        reward=fmean(rollout.reward for rollout in rollouts),
        episodes=len(rollouts),
        expected=len(current.expected),
        metrics=rollout_metrics(rollouts),
    )


def _is_pinned(rollout: Rollout, version: int) -> bool:
    return (
        rollout.status != "error"
        and rollout.oldest_version == version
        and rollout.newest_version == version
    )
