"""The Hub store against a small Hub, through the real huggingface_hub and hf_xet."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from deltawire.protocol.errors import (
    Fenced,
    ObjectExists,
    ObjectMissing,
    SettingsError,
    StoreError,
)
from deltawire.store.base import Store

FileOf = Callable[[bytes], Path]
OpenHub = Callable[..., Store]
TOKEN = "hf_test_token"


@pytest.fixture
def open_hub(fake_hub: Any) -> OpenHub:
    from deltawire.store.hub import HubStore

    def open_one(token: str = TOKEN) -> Store:
        return HubStore(
            "owner/name",
            token=SecretStr(token),
            endpoint=fake_hub.url,
            settle_s=0.01,
            abandoned_s=0.05,
        )

    return open_one


@pytest.fixture
def store(open_hub: OpenHub) -> Iterator[Store]:
    opened = open_hub()
    yield opened
    opened.close()


def test_a_new_bucket_is_private(fake_hub: Any, store: Store, file_of: FileOf) -> None:
    store.put("a", file_of(b"1"))

    assert fake_hub.private == {"owner/name": True}


def test_a_bucket_that_exists_is_used_as_it_is(
    fake_hub: Any, store: Store, file_of: FileOf
) -> None:
    fake_hub.buckets["owner/name"], fake_hub.private["owner/name"] = {}, False
    store.put("a", file_of(b"1"))

    assert fake_hub.private == {"owner/name": False}
    assert list(fake_hub.buckets["owner/name"]) == ["a"]


def test_an_upload_that_the_hub_reports_as_failed_is_an_error(
    fake_hub: Any, store: Store, file_of: FileOf
) -> None:
    fake_hub.fail_paths.add("a")

    with pytest.raises(StoreError, match=r"^a .*hf://buckets/owner/name"):
        store.put("a", file_of(b"1"))


def test_what_stands_there_after_an_upload_must_be_what_was_sent(
    fake_hub: Any, store: Store, file_of: FileOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer's object under the same key, landing right after ours."""
    store.put("other", file_of(b"another writer's"))
    landing = fake_hub.batch

    def overtaken(bucket: str, lines: list[dict[str, str]]) -> list[dict[str, str]]:
        failed: list[dict[str, str]] = landing(bucket, lines)
        files = fake_hub.buckets[bucket]
        files["a"] = {**files["other"], "path": "a"}
        return failed

    monkeypatch.setattr(fake_hub, "batch", overtaken)
    with pytest.raises(ObjectExists, match="another writer"):
        store.put("a", file_of(b"ours"))


def test_a_swap_that_is_overtaken_is_fenced(
    fake_hub: Any, store: Store, file_of: FileOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("other", file_of(b"another writer's"))
    landing = fake_hub.batch

    def overtaken(bucket: str, lines: list[dict[str, str]]) -> list[dict[str, str]]:
        failed: list[dict[str, str]] = landing(bucket, lines)
        files = fake_hub.buckets[bucket]
        if "latest.json" in files:
            files["latest.json"] = {**files["other"], "path": "latest.json"}
        return failed

    monkeypatch.setattr(fake_hub, "batch", overtaken)
    with pytest.raises(Fenced):
        store.swap("latest.json", b"ours", expect=None)


def test_a_busy_hub_is_asked_again(fake_hub: Any, store: Store, file_of: FileOf) -> None:
    store.put("a", file_of(b"1"))
    fake_hub.refuse = 2

    assert store.read("a")[0] == b"1"
    assert fake_hub.refuse == 0


def test_an_upload_whose_answer_was_lost_is_sent_again(
    fake_hub: Any, store: Store, file_of: FileOf
) -> None:
    store.put("first", file_of(b"1"))
    fake_hub.lose = 1

    assert store.put("a", file_of(b"mine")).bytes == 4
    assert store.read("a")[0] == b"mine"


def test_reading_what_did_not_change_costs_one_call(
    fake_hub: Any, store: Store, file_of: FileOf
) -> None:
    store.swap("latest.json", b"1", expect=None)
    store.read("latest.json")
    fake_hub.requests.clear()

    for _ in range(3):
        assert store.read("latest.json")[0] == b"1"
    assert fake_hub.requests == ["POST /api/buckets/owner/name/paths-info"] * 3


def test_a_download_by_hash_looks_no_path_up(
    fake_hub: Any, store: Store, file_of: FileOf, tmp_path: Path
) -> None:
    info = store.put("a", file_of(b"1" * 1000))
    fake_hub.requests.clear()
    store.fetch("a", tmp_path / "a", size_bytes=info.bytes, xet_hash=info.xet_hash)

    assert (tmp_path / "a").read_bytes() == b"1" * 1000
    assert "POST /api/buckets/owner/name/paths-info" not in fake_hub.requests


def test_an_object_removed_meanwhile_is_missing_also_by_hash(
    store: Store, file_of: FileOf, tmp_path: Path
) -> None:
    info = store.put("a", file_of(b"1" * 1000))
    store.delete(["a"])

    with pytest.raises(ObjectMissing):
        store.fetch("a", tmp_path / "a", size_bytes=info.bytes, xet_hash=info.xet_hash)


def test_a_bucket_that_does_not_exist_reads_as_missing_and_says_why(store: Store) -> None:
    assert store.stat("a") is None
    assert store.list() == []
    with pytest.raises(ObjectMissing, match="no object"):
        store.read("a")


def test_a_wrong_token_is_said_so_without_showing_it(open_hub: OpenHub, file_of: FileOf) -> None:
    store = open_hub(token="hf_wrong_secret")

    with pytest.raises(StoreError, match="401; check what the token may do") as raised:
        store.put("a", file_of(b"1"))
    assert "hf_wrong_secret" not in f"{raised.value} {store.uri} {store!r}"


def test_a_token_is_not_sent_in_the_clear() -> None:
    from deltawire.store.hub import HubStore

    with pytest.raises(SettingsError, match="expected https"):
        HubStore("owner/name", token=SecretStr(TOKEN), endpoint="http://example.com")


def test_the_lease_object_is_no_object(store: Store) -> None:
    store.swap("run/latest.json", b"1", expect=None)

    assert [info.key for info in store.list()] == ["run/latest.json"]


def test_the_lease_of_a_dead_writer_is_taken(store: Store, open_hub: OpenHub) -> None:
    first = store.swap("latest.json", b"1", expect=None)
    second = open_hub()

    assert second.swap("latest.json", b"2", expect=first.etag).etag != first.etag
    with pytest.raises(Fenced):
        store.swap("latest.json", b"3", expect=first.etag)


def test_the_budget_counts_what_the_hub_counts(
    fake_hub: Any, store: Store, file_of: FileOf, tmp_path: Path
) -> None:
    store.put("a", file_of(b"1"))
    head = store.swap("latest.json", b"1", expect=None)
    store.swap("latest.json", b"2", expect=head.etag)
    store.read("latest.json")
    store.fetch("a", tmp_path / "a")
    store.list()
    store.delete(["a"])

    assert store.budget().calls == len(fake_hub.requests)
    assert store.budget().allowed == 1000


def test_a_version_costs_nine_calls(fake_hub: Any, store: Store, file_of: FileOf) -> None:
    head = store.swap("latest.json", b"0", expect=None)
    fake_hub.requests.clear()
    store.put("delta", file_of(b"1"))
    store.swap("latest.json", b"1", expect=head.etag)

    assert len(fake_hub.requests) == 9


_IN_ANOTHER_PROCESS = """
import json, sys
from pathlib import Path
from deltawire.store.open import open_store
store = open_store("hf://buckets/owner/name/prefix")
if sys.argv[1] == "write":
    Path(sys.argv[2]).write_bytes(b"w" * 100_000)
    info = store.put("a.safetensors", Path(sys.argv[2]))
    print(json.dumps([store.uri, info.bytes, info.xet_hash]))
else:
    store.fetch("a.safetensors", Path(sys.argv[2]))
    print(json.dumps([store.uri, len(Path(sys.argv[2]).read_bytes())]))
"""


def test_two_processes_meet_in_one_bucket_by_the_usual_variables(
    fake_hub: Any, tmp_path: Path
) -> None:
    """HF_ENDPOINT and HF_TOKEN, as a user sets them; no progress bar in a service's log."""

    def run(act: str) -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", _IN_ANOTHER_PROCESS, act, str(tmp_path / act)],
            env={**os.environ, "HF_ENDPOINT": fake_hub.url, "HF_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert "%|" not in done.stderr
        answer: list[object] = json.loads(done.stdout)
        return answer

    uri, size, xet_hash = run("write")

    assert uri == "hf://buckets/owner/name/prefix"
    assert fake_hub.buckets["owner/name"]["prefix/a.safetensors"]["xetHash"] == xet_hash
    assert run("read") == [uri, size]


@pytest.mark.parametrize("cut", [ConnectionError("cut"), TimeoutError("slow"), RuntimeError("xet")])
def test_a_transfer_that_is_cut_is_tried_again(
    fake_hub: Any,
    store: Any,
    file_of: FileOf,
    monkeypatch: pytest.MonkeyPatch,
    cut: Exception,
) -> None:
    send, failures = store._api.batch_bucket_files, [cut]

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return send(*args, **kwargs)

    monkeypatch.setattr(store._api, "batch_bucket_files", sometimes)

    assert store.put("a", file_of(b"whole")).bytes == 5
    assert store.read("a")[0] == b"whole"
