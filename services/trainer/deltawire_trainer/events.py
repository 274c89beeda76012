"""Server-sent events: whoever listens hears of every step, sync and change of state."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from pydantic import BaseModel

_BACKLOG = 256
"""Events a slow listener may fall behind before it loses the oldest."""
_KEEP_ALIVE_S = 15.0
"""A comment line this often keeps proxies from closing a silent stream."""


class EventHub:
    """Fans events out to listeners of one event loop."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[str]] = set()

    def publish(self, kind: str, body: BaseModel | dict[str, object]) -> None:
        """Send to everyone who listens now."""
        data = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
        message = f"event: {kind}\ndata: {json.dumps(data)}\n\n"
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(message)

    async def stream(self) -> AsyncIterator[str]:
        """Text of an SSE response, for as long as the listener stays."""
        with self.listening() as queue:
            yield ": listening\n\n"
            while True:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S):
                        message = await queue.get()
                except TimeoutError:
                    message = ": still here\n\n"
                yield message

    @contextmanager
    def listening(self) -> Iterator[asyncio.Queue[str]]:
        """A queue of messages for as long as the block lasts."""
        queue: asyncio.Queue[str] = asyncio.Queue(_BACKLOG)
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)
