"""A request under way: its rows on the engine's thread, its answer on the caller's event loop."""

import asyncio
from collections.abc import Callable

from deltawire.protocol.errors import DeltawireError, VersionNotServed
from deltawire.protocol.generation import Completion, GenerateRequest
from deltawire.protocol.versions import PolicyVersion, spans_of
from deltawire_inference.engines.base import SampledToken
from deltawire_inference.engines.torch.row import Row

PIN_RETRY_S = 1.0
"""What a caller is told to wait before it asks again for a version that is not served."""

Event = SampledToken | DeltawireError | None


class Flight:
    """Made on the event loop of its caller."""

    def __init__(self, request: GenerateRequest, rows: list[Row], *, streams: bool) -> None:
        self.request, self.rows = request, rows
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._open = len(rows)
        self.over = False

    async def next_token(self) -> SampledToken | None:
        """The next token when streaming; None at the end. Raises what ended the request."""
        event = await self._events.get()
        if isinstance(event, DeltawireError):
            raise event
        return event

    def advance(self, row: Row, *, version: int) -> list[Callable[[], None]]:
        """Engine thread: a row moved on. Returns what to deliver on the caller's loop."""
        events: list[Event] = [token_of(row)] if self._streams else []
        if row.finish_reason is not None:
            self._open -= 1
            if row.finish_reason == "abort" and row.request.policy_version not in (None, version):
                return self.fail(_pin_lost(row.request, version))
            if self._open == 0:
                self.over = True
                events.append(None)
        return [lambda: self._deliver(events)] if events else []

    def fail(self, error: DeltawireError) -> list[Callable[[], None]]:
        """Engine thread: the request ends with an error. Only the first one counts."""
        if self.over:
            return []
        self.over = True
        return [lambda: self._deliver([error])]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where its caller lives."""
        return self._loop

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self._events.put_nowait(event)


def _pin_lost(request: GenerateRequest, version: int) -> VersionNotServed:
    assert request.policy_version is not None
    return VersionNotServed(
        wanted=request.policy_version, serving=version, retry_after_s=PIN_RETRY_S
    )


def token_of(row: Row) -> SampledToken:
    """The row's newest token; without one when an abort came before or after it."""
    if row.finish_reason == "abort" or not row.draws:
        return SampledToken(index=row.index, token_id=None, finish_reason=row.finish_reason)
    drawn = row.draws[-1]
    return SampledToken(
        index=row.index,
        token_id=drawn.token_id,
        logprob=drawn.logprob,
        version=PolicyVersion(row.versions[-1]),
        finish_reason=row.finish_reason,
        top_logprobs=drawn.top_logprobs,
        allowed=drawn.allowed,
    )


def completion_of(row: Row) -> Completion:
    """A finished row as the caller gets it."""
    assert row.finish_reason is not None
    request = row.request
    allowed = [drawn.allowed for drawn in row.draws if drawn.allowed is not None]
    return Completion(
        token_ids=[drawn.token_id for drawn in row.draws],
        logprobs=[drawn.logprob for drawn in row.draws],
        finish_reason=row.finish_reason,
        spans=spans_of(row.versions),
        sampling_mask=allowed if len(allowed) == len(row.draws) and allowed else None,
        top_logprobs=[drawn.top_logprobs for drawn in row.draws] if request.top_logprobs else None,
    )
