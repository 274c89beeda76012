"""A bounded pool of threads for code that blocks: users' worlds and rewards.

A Python thread cannot be stopped. A call that outlives its deadline is given up and its thread
replaced, so that the pool keeps its size; when too many threads hang the pool says so, the service
turns unready, and whoever runs it restarts it.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

_HANGING_PER_WORKER = 4
"""Threads given up, as a multiple of the pool's size, before the pool calls itself broken."""


class Pool:
    """Runs blocking calls, first come first served."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.hanging = 0
        """Threads whose call was given up and has not returned."""
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._started = 0
        self._idle = 0
        self._lock = threading.Lock()

    @property
    def broken(self) -> bool:
        """Too many calls hang: a restart is due."""
        return self.hanging > self.workers * _HANGING_PER_WORKER

    async def __call__(
        self,
        call: Callable[[], Value | Awaitable[Value]],
        *,
        timeout_s: float,
        blocking: bool,
    ) -> Value:
        """Run a call, in a thread when it blocks, and await what it returns when awaitable.

        Raises TimeoutError when the call takes longer, waiting for a thread not counted.
        """
        try:
            answer = await self._in_thread(call, timeout_s) if blocking else call()
            if not isinstance(answer, Awaitable):
                return answer
            async with asyncio.timeout(timeout_s):
                return await answer
        except SystemExit as error:
            raise _settable(error) from error

    async def _in_thread(self, call: Callable[[], Value], timeout_s: float) -> Value:
        job = _Job(call, asyncio.get_running_loop())
        self._jobs.put(job)
        self._grow()
        try:
            await job.begun
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(job.done)
        except TimeoutError:
            self._give_up(job)
            raise
        except asyncio.CancelledError:
            job.wanted = False
            raise

    def _grow(self) -> None:
        with self._lock:
            busy = self._started - self.hanging
            if self._jobs.qsize() > self._idle and busy < self.workers:
                self._started += 1
                threading.Thread(target=self._work, name="world", daemon=True).start()

    def _give_up(self, job: "_Job[Any]") -> None:
        with self._lock:
            if job.finished:
                return
            job.given_up = True
            self.hanging += 1
        self._grow()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.wanted:
                job.run()
            with self._lock:
                job.finished = True
                if job.given_up:  # its place was taken meanwhile
                    self.hanging -= 1
                    self._started -= 1
                    return

    def _next(self) -> "_Job[Any] | None":
        with self._lock:
            self._idle += 1
        job = self._jobs.get()
        with self._lock:
            self._idle -= 1
        return job

    def close(self) -> None:
        """Let idle threads end. Hanging ones are daemons and end with the process."""
        for _ in range(self._started):
            self._jobs.put(None)


class _Job(Generic[Value]):
    """One call, and where to put its answer."""

    def __init__(self, call: Callable[[], Value], loop: asyncio.AbstractEventLoop) -> None:
        self.wanted = True
        self.given_up = False
        self.finished = False
        self.begun: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[Value] = loop.create_future()
        self.done.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._call, self._loop = call, loop

    def run(self) -> None:
        self._later(self._begin)
        try:
            answer = self._call()
        except BaseException as error:  # noqa: BLE001 - handed over to whoever awaits it
            self._later(self._fail, _settable(error))
        else:
            self._later(self._finish, answer)

    def _begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def _finish(self, answer: Value) -> None:
        if not self.done.done():
            self.done.set_result(answer)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _later(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop has closed; nobody waits any more
            return


def _settable(error: BaseException) -> Exception:
    """A user's SystemExit must not end the service, and no future takes a StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"raised {error!r}")
