"""The engine's thread: steps while there is work, does errands between two steps.

An errand is a function of the core. Because it runs between steps, on the same thread, it sees no
half-done state: this is where weights are swapped. A swap in mode `drain` waits until the running
rows are done; the others go first.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from deltawire.protocol.errors import DeltawireError, EngineError
from deltawire_inference.engines.base import SwapMode
from deltawire_inference.engines.rate import TokenRate
from deltawire_inference.engines.torch.core import EngineCore
from deltawire_inference.engines.torch.flight import Flight
from deltawire_inference.engines.torch.row import Row

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOutcome:
    """What a swap cost."""

    pause_s: float
    mode: SwapMode
    """As it was done: a paused engine cannot drain and keeps instead."""
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swap:
    enter_weights: Callable[[], None]
    mode: SwapMode
    version: int
    future: "Future[SwapOutcome]"


class EngineLoop:
    """Owns a core and the thread it lives on."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._wake = threading.Condition()
        self._errands: deque[Callable[[], None]] = deque()
        self._swaps: deque[_Swap] = deque()
        self._flights: dict[int, Flight] = {}
        self._paused = self._stopping = False
        self.rate = TokenRate()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step under way; open requests fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def counts(self) -> tuple[int, int]:
        """Rows running and waiting."""
        return len(self._core.running), len(self._core.waiting)

    @property
    def paused(self) -> bool:
        """Whether no step is made although there may be work."""
        return self._paused

    def set_paused(self, paused: bool) -> "Future[None]":
        """Stop or go on; done once no step is under way."""

        def change() -> None:
            self._paused = paused

        return self.between_steps(change)

    def between_steps(self, errand: Callable[[], T]) -> "Future[T]":
        """Run a function on the engine's thread when no step is under way."""
        future: Future[T] = Future()
        self._post(lambda: _fulfil(future, errand))
        return future

    def submit(self, flight: Flight) -> None:
        """Take on a request."""

        def add() -> None:
            self._flights |= {id(row): flight for row in flight.rows}
            self._core.add(flight.rows)

        self._post(add)

    def cancel(self, flight: Flight) -> None:
        """Its caller is gone."""
        self._post(lambda: self._forget(flight))

    def swap(
        self, enter_weights: Callable[[], None], *, mode: SwapMode, version: int
    ) -> "Future[SwapOutcome]":
        """Swap weights when the mode allows. The future fails as `enter_weights` does."""
        future: Future[SwapOutcome] = Future()
        order = _Swap(enter_weights=enter_weights, mode=mode, version=version, future=future)
        self._post(lambda: self._swaps.append(order))
        return future

    def _post(self, errand: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise EngineError("the engine is stopped")
            self._errands.append(errand)
            self._wake.notify()

    @torch.inference_mode()
    def _run(self) -> None:
        while self._wait():
            while self._errands:
                self._errands.popleft()()
            self._swap_if_possible()
            if not self._paused and self._core.has_work:
                self._step()
        stopped = EngineError("the engine was stopped")
        while self._errands:
            self._errands.popleft()()
        for order in self._swaps:
            order.future.set_exception(stopped)
        self._fail_all(stopped)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False to end."""
        with self._wake:
            self._wake.wait_for(self._has_something)
            return not self._stopping

    def _has_something(self) -> bool:
        can_step = self._core.has_work and not self._paused
        return bool(self._stopping or self._errands or self._swaps or can_step)

    def _step(self) -> None:
        try:
            moved = self._core.step()
        except Exception as error:  # the engine's border: requests fail, the engine lives on
            log.error("step failed", exc_info=error)
            self._fail_all(EngineError(f"the engine could not make a step: {error}"))
            return
        self.rate.add(len(moved))
        self._advance(moved)

    def _advance(self, rows: list[Row]) -> None:
        deliveries: dict[Flight, list[Callable[[], None]]] = {}
        for row in rows:
            flight = self._flights.get(id(row))
            if flight is None:
                continue
            deliveries.setdefault(flight, []).extend(
                flight.advance(row, version=self._core.version)
            )
            if flight.over:
                self._forget(flight)
        _deliver(deliveries)

    def _forget(self, flight: Flight) -> None:
        for row in flight.rows:
            self._flights.pop(id(row), None)
        self._core.remove([row for row in flight.rows if row.finish_reason is None])

    def _fail_all(self, error: DeltawireError) -> None:
        flights = set(self._flights.values())
        _deliver({flight: flight.fail(error) for flight in flights})
        for flight in flights:
            self._forget(flight)

    def _swap_if_possible(self) -> None:
        while self._swaps:
            order = self._swaps[0]
            if order.mode == "drain" and self._core.running and not self._paused:
                self._core.admits = False
                return
            self._swaps.popleft()
            self._core.admits = True
            _fulfil(order.future, partial(self._swap, order))

    def _swap(self, order: _Swap) -> SwapOutcome:
        mode: SwapMode = "keep" if order.mode == "drain" and self._core.running else order.mode
        started = time.perf_counter()
        ended, recomputed = self._core.swap(order.enter_weights, mode=mode, version=order.version)
        pause_s = time.perf_counter() - started
        self._advance(ended)
        return SwapOutcome(pause_s=pause_s, mode=mode, recomputed_tokens=recomputed)


def _fulfil(future: "Future[T]", errand: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = errand()
    except Exception as error:  # noqa: BLE001 - an errand's error belongs to whoever sent it
        future.set_exception(error)
    else:
        future.set_result(result)


def _deliver(deliveries: dict[Flight, list[Callable[[], None]]]) -> None:
    """Hand over a step's news: one wake-up for each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for flight, calls in deliveries.items():
        loops.setdefault(flight.loop, []).extend(calls)
    for loop, calls in loops.items():
        if calls and not loop.is_closed():
            loop.call_soon_threadsafe(_run_all, calls)


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
