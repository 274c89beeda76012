"""Keeps groups coming: issues tickets as far ahead as staleness allows, reads what comes home.

Runs beside training for the whole run. The streams may go away for a while: it waits and goes on.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deltawire.job.spec import JobSpec
from deltawire.protocol.errors import StreamUnavailable
from deltawire.protocol.rollouts import Ticket
from deltawire.streams.base import DeadLetter, TrainerStreams, counted_reason
from deltawire_trainer.guard import Guard
from deltawire_trainer.intake import Intake, UsableGroup
from deltawire_trainer.journal import Dropped, Issued, Journal
from deltawire_trainer.ledger import Ledger
from deltawire_trainer.tickets import TicketBook, oldest_start, room

log = logging.getLogger(__name__)

END_OF_RUN = "end_of_run"
"""Why tickets and groups are dropped when the last step is done."""
_READ_S = 0.5
"""Longest wait for groups before tickets are looked after again."""
_SHOWN = 32
"""Dead letters that the status tells of."""
_AWAY_S = 1.0
"""Pause before streams that could not be reached are tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands, as far as tickets are concerned."""

    live_version: int
    """The newest version whose diff was taken."""
    steps_since_sync: int
    in_flight: int
    """1 while a step is being made, which the next groups come after."""
    steps_left: int
    """After the one in flight."""
    newest_start: int | None = None
    """Order nothing yet that must start on a newer version than this: it is to be evaluated first,
    and producers that wait for the next version could not play the evaluation."""


class Feeder:
    """The trainer's side of the streams."""

    def __init__(
        self,
        *,
        streams: TrainerStreams,
        intake: Intake,
        ledger: Ledger,
        journal: Journal,
        book: TicketBook,
        guard: Guard,
        job: JobSpec,
        first_ticket: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.intake = intake
        self.away = False
        """Whether the streams cannot be reached now."""
        self.paused = False
        self.closing = False
        """Issue no more training tickets, and go on reading: the run ends."""
        self._streams, self._ledger, self._journal = streams, ledger, journal
        self._book, self._guard, self._job = book, guard, job
        self._next_ticket = first_ticket
        self._clock = clock
        self._position: Position | None = None
        self._taken = 0
        self._unsent: list[Ticket] = []
        self.dead_letters: deque[DeadLetter] = deque(maxlen=_SHOWN)
        """The newest entries that were set aside, by anybody."""
        self._heeded = ""
        self._caught_up = False
        self._halted = False
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Issue and read until halted."""
        while not self._halted:
            try:
                await self._catch_up()
                await self._issue()
                if await self.intake.read(timeout_s=_READ_S):
                    self._arrived.set()
                self.away = False
            except StreamUnavailable as error:
                if not self.away:
                    log.warning("streams away", extra={"reason": str(error)})
                self.away = True
                await asyncio.sleep(_AWAY_S)

    def halt(self) -> None:
        """End `run` after its present round."""
        self._halted = True

    def stand_at(self, position: Position, *, taken: int = 0) -> None:
        """Training moved on. `taken` groups are in the step in flight, not yet on the ledger."""
        self._position, self._taken = position, taken

    async def batch(self, *, timeout_s: float) -> list[UsableGroup]:
        """The groups of the next step, or nothing when they did not come in time."""
        position = self._position
        assert position is not None
        give_up_at = time.monotonic() + timeout_s
        while True:
            self._arrived.clear()
            groups = self.intake.batch(
                self._job.train.groups_per_step,
                live_version=position.live_version,
                max_staleness=self._guard.allowed_staleness(self._job.train.max_staleness),
            )
            left_s = give_up_at - time.monotonic()
            if groups or left_s <= 0:
                return groups
            try:
                async with asyncio.timeout(left_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []

    def evaluation_tickets(self, version: int) -> list[Ticket]:
        """The orders of an evaluation of a version, not yet issued."""
        return self._book.evaluation(version, now_s=self._clock())

    async def issue_evaluation(self, tickets: list[Ticket]) -> None:
        """Order an evaluation. Raises StreamError."""
        await self._streams.issue(tickets)

    async def wind_up(self) -> None:
        """End of the run: withdraw what is open, and give what is left its end."""
        await self._catch_up()
        await self._send()
        for group_id in await self._streams.cancel_open():
            self._write_off(group_id, END_OF_RUN)
        await self.intake.drain()
        await self.intake.drop_all(END_OF_RUN)
        await self._heed_dead_letters()

    async def _issue(self) -> None:
        """Fill up to the staleness bound."""
        await self._send()
        await self._heed_dead_letters()
        # From here to the journal without an await: position and ledger must be of one moment.
        position, spec = self._position, self._job.train
        if position is None or self.paused or self.closing:
            return
        ahead = self._ledger.open - self._taken
        count = room(
            open_groups=ahead,
            groups_per_step=spec.groups_per_step,
            depth=self._guard.allowed_depth(spec.max_staleness),
            steps_left=position.steps_left,
            oversample=spec.oversample_groups,
        )
        if position.newest_start is not None:
            starts = [self._oldest_start(position, ahead + index) for index in range(count)]
            count = sum(start <= position.newest_start for start in starts)
        if not count:
            return
        numbers = range(self._next_ticket, self._next_ticket + count)
        self._next_ticket += count
        ids = [self._book.train_id(number) for number in numbers]
        self._journal.append(Issued(ids=ids))
        self._ledger.issue(ids)
        self._unsent += self._orders(list(numbers), ahead=ahead)
        await self._send()

    async def _send(self) -> None:
        """Hand over the tickets that are in the journal and not yet in the streams."""
        if self._unsent:
            await self._streams.issue(self._unsent)
            self._unsent = []

    def _orders(self, numbers: list[int], *, ahead: int) -> list[Ticket]:
        position = self._position
        assert position is not None
        return [
            self._book.train(
                number,
                min_version=self._oldest_start(position, ahead + index),
                now_s=self._clock(),
            )
            for index, number in enumerate(numbers)
        ]

    async def _catch_up(self) -> None:
        """Once: issue what the journal of an earlier process has open. Its tickets may never have
        reached the streams; issuing them again adds nothing when they did."""
        if self._caught_up:
            return
        still_open = set(self._ledger.open_ids())
        numbers = [n for n in range(self._next_ticket) if self._book.train_id(n) in still_open]
        await self._streams.issue(self._orders(numbers, ahead=0))
        self._caught_up = True

    def _oldest_start(self, position: Position, ahead: int) -> int:
        return oldest_start(
            live_version=position.live_version,
            steps_since_sync=position.steps_since_sync + position.in_flight,
            ahead=ahead,
            groups_per_step=self._job.train.groups_per_step,
            sync_every=self._job.sync.sync_every,
            max_staleness=self._guard.allowed_staleness(self._job.train.max_staleness),
            oversample=self._job.train.oversample_groups,
        )

    async def _heed_dead_letters(self) -> None:
        """What the streams set aside will not come: another ticket takes its place."""
        while letters := await self._streams.dead_letters(after=self._heeded):
            for letter in letters:
                if not self.intake.holds(letter.id):
                    self._write_off(letter.id, f"dead_letter: {counted_reason(letter.reason)}")
                self.dead_letters.append(letter)
            self._heeded = letters[-1].entry_id

    def _write_off(self, group_id: str, reason: str) -> None:
        if self._ledger.fate(group_id) == "open":
            self._journal.append(Dropped(group_id=group_id, reason=reason))
            self._ledger.drop(group_id, reason)
