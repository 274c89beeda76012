"""The Hub's change feed: what wakes, what does not, and how it ends."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from deltawire.store.base import Store, Watchable
from deltawire.store.hub_events import events
from deltawire.store.local import LocalStore

TOKEN = "hf_test_token"
FOREVER_S = 30.0


class Wakes:
    """Counts wake-ups, and lets a test wait for one more."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def reach(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, FOREVER_S)


@pytest.fixture
def store(fake_hub: Any) -> Iterator[Store]:
    from deltawire.store.hub import HubStore

    opened = HubStore(
        "owner/name", token=SecretStr(TOKEN), endpoint=fake_hub.url, settle_s=0.01, abandoned_s=0.05
    )
    opened.swap("run/latest.json", b"1", expect=None)
    yield opened
    opened.close()


def test_a_change_of_the_watched_key_wakes(store: Any, fake_hub: Any) -> None:
    wakes = Wakes()
    watch = store.watch("run/latest.json", wakes)
    wakes.reach(1)  # on opening: what happened before is unknown
    _, info = store.read("run/latest.json")
    store.swap("run/latest.json", b"2", expect=info.etag)
    wakes.reach(2)

    watch.close()
    fake_hub.end_streams()


def test_a_stream_that_the_server_ends_is_opened_again(store: Any, fake_hub: Any) -> None:
    wakes = Wakes()
    watch = store.watch("run/latest.json", wakes)
    wakes.reach(1)
    fake_hub.end_streams()
    wakes.reach(2)

    watch.close()
    fake_hub.end_streams()


def test_a_hub_without_the_feed_is_left_alone(store: Any, fake_hub: Any) -> None:
    fake_hub.serves_events = False
    watch = store.watch("run/latest.json", Wakes())
    watch._thread.join(FOREVER_S)

    assert not watch._thread.is_alive()
    assert sum("events" in request for request in fake_hub.requests) == 1


def test_only_stores_that_can_tell_are_watchable(store: Store, tmp_path: Any) -> None:
    assert isinstance(store, Watchable)
    assert not isinstance(LocalStore(tmp_path), Watchable)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"event: ready\ndata: {}\n\n", [("ready", "{}")]),
        (b": ping\n\nevent: changes\r\ndata: a\r\ndata: b\r\n\r\n", [("changes", "a\nb")]),
        (b"data:x\n\ndata: y\n\n", [("message", "x"), ("message", "y")]),
        (b"event: changes\ndata: cut off", []),
        (b"\n\n\n", []),
    ],
)
def test_a_stream_is_cut_into_events(stream: bytes, expected: list[tuple[str, str]]) -> None:
    assert list(events(stream.splitlines(keepends=True))) == expected
