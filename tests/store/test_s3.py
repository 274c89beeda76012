"""S3 over a real server with a middleman in front: lost answers, ignored headers, refusals."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltawire.protocol.errors import ObjectExists, ObjectMissing, StoreError, StoreUnavailable
from deltawire.store.base import Store
from deltawire.store.open import open_store


@pytest.fixture
def store(s3_bucket: str) -> Iterator[Store]:
    opened = open_store(f"s3://{s3_bucket}/prefix")
    yield opened
    opened.close()


@pytest.fixture
def middleman(s3_server: Any) -> Iterator[Any]:
    yield s3_server
    s3_server.behave()


def test_a_server_that_ignores_conditions_is_refused_before_anything_is_written(
    middleman: Any, store: Store, file_of: Callable[[bytes], Path]
) -> None:
    middleman.drop_conditions = True

    with pytest.raises(StoreError, match="ignores conditional writes"):
        store.put("a", file_of(b"1"))
    with pytest.raises(StoreError, match="ignores conditional writes"):
        store.swap("latest.json", b"1", expect=None)
    assert store.list() == []


def test_a_put_whose_answer_was_lost_is_not_taken_for_anothers(
    middleman: Any, store: Store, file_of: Callable[[bytes], Path]
) -> None:
    middleman.lose_answers = 1
    info = store.put("a", file_of(b"mine"))

    assert info.bytes == 4
    assert store.read("a")[0] == b"mine"
    with pytest.raises(ObjectExists):
        store.put("a", file_of(b"mine"))


def test_a_busy_server_is_asked_again(
    middleman: Any, store: Store, file_of: Callable[[bytes], Path]
) -> None:
    store.put("a", file_of(b"1"))
    middleman.refuse = 2

    assert store.read("a")[0] == b"1"
    assert middleman.refuse == 0


def test_a_server_that_stays_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = open_store("s3://bucket/prefix?endpoint_url=http://127.0.0.1:1&region=eu-west-1")

    with pytest.raises(StoreUnavailable) as raised:
        store.read("a")
    assert "very-secret" not in f"{raised.value} {store.uri}"
    store.close()


@pytest.mark.usefixtures("s3_bucket")
def test_a_bucket_that_does_not_exist_is_said_so() -> None:
    store = open_store("s3://no-such-bucket")

    with pytest.raises(StoreError, match="NoSuchBucket"):
        store.list()
    store.close()


def test_what_did_not_change_is_not_sent_again(s3_bucket: str) -> None:
    writer, reader = open_store(f"s3://{s3_bucket}"), open_store(f"s3://{s3_bucket}")
    statuses: list[int] = []
    reader._client.meta.events.register(
        "after-call.s3.GetObject",
        lambda http_response, **_: statuses.append(http_response.status_code),
    )
    first = writer.swap("latest.json", b"one", expect=None)

    assert [reader.read("latest.json")[0] for _ in range(2)] == [b"one", b"one"]
    second = writer.swap("latest.json", b"two", expect=first.etag)
    body, info = reader.read("latest.json")

    assert (body, info.etag) == (b"two", second.etag)
    assert statuses == [200, 304, 200]
    writer.delete(["latest.json"])
    with pytest.raises(ObjectMissing):
        reader.read("latest.json")
