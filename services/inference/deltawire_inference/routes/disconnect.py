"""Work for a caller who may leave: when the connection ends, the work is cancelled."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

T = TypeVar("T")


class CallerGone(Exception):
    """The connection ended before the answer was ready; nobody reads one."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of the work. Raises CallerGone when the caller left first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
