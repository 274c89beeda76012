"""Independent pieces of work, on threads when asked: the loops inside give up the GIL."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def mapped(
    work: Callable[[Piece], Result], pieces: Iterable[Piece], *, threads: int
) -> list[Result]:
    """Results in the order of the pieces. The first error is raised."""
    if threads <= 1:
        return [work(piece) for piece in pieces]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces))
