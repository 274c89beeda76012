"""Several awaits that stand or fall together."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def together(*works: Awaitable[T]) -> list[T]:
    """All results, in order. When one fails, the others are cancelled and have ended before its
    error is raised: nobody goes on sampling, or opens a session, for a caller that is gone."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
