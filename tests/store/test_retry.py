"""Back-off is arithmetic; no test here sleeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.protocol.errors import StoreError, StoreUnavailable
from deltawire.store.calls import WINDOW_S, CallCounter
from deltawire.store.retry import (
    ATTEMPTS,
    MAX_DELAY_S,
    backoff_delays_s,
    backoff_s,
    retrying,
)


@given(st.integers(0, 10_000), st.floats(0, 1), st.none() | st.floats(0, 1e6))
def test_a_wait_is_never_negative_and_never_above_the_cap(
    attempt: int, jitter: float, asked_s: float | None
) -> None:
    assert 0 <= backoff_s(attempt, jitter=jitter, asked_s=asked_s) <= MAX_DELAY_S


def test_waits_double_up_to_the_cap() -> None:
    waits = [backoff_s(attempt, jitter=1.0) for attempt in range(8)]

    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_server_that_asks_for_more_time_gets_it() -> None:
    assert backoff_s(0, jitter=0.0, asked_s=7.0) == 7.0


def test_an_unavailable_store_is_asked_again_until_it_answers() -> None:
    answers = iter([StoreUnavailable("1"), StoreUnavailable("2"), "fine"])
    slept: list[float] = []

    def call() -> str:
        answer = next(answers)
        if isinstance(answer, StoreUnavailable):
            raise answer
        return answer

    assert retrying(call, delays_s=iter([0.1, 0.2, 0.3]), sleep=slept.append) == "fine"
    assert slept == [0.1, 0.2]


def test_the_last_failure_reaches_the_caller() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        raise StoreUnavailable(f"call {len(calls)}")

    with pytest.raises(StoreUnavailable, match=f"call {ATTEMPTS}"):
        retrying(call, delays_s=iter([0.0] * (ATTEMPTS - 1)), sleep=lambda _: None)
    assert len(list(backoff_delays_s())) == ATTEMPTS - 1


def test_other_errors_are_not_repeated() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        raise StoreError("refused")

    with pytest.raises(StoreError, match="refused"):
        retrying(call, sleep=lambda _: None)
    assert calls == [1]


def test_calls_leave_the_window_after_its_length() -> None:
    now = 0.0
    counter = CallCounter(allowed=1000, clock=lambda: now)
    counter.add(3)
    now = WINDOW_S / 2
    counter.add()
    assert counter.budget().calls == 4
    now = WINDOW_S
    assert counter.budget().calls == 1
    assert counter.budget().allowed == 1000
