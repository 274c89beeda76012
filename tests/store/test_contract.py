"""What every store promises, run over each of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltawire.protocol.errors import (
    Fenced,
    InvalidKey,
    ObjectExists,
    ObjectMissing,
    StoreError,
)
from deltawire.store.base import Store

FileOf = Callable[[bytes], Path]
BODY = b"\x00\xffweights" * 1000
BAD_KEYS = [
    "",
    "/etc/passwd",
    "../up",
    "a/../../b",
    "a//b",
    "a/./b",
    "hf://x/y",
    "a b",
    "ä",
    "a\nb",
]


def test_a_file_put_is_the_file_fetched(store: Store, file_of: FileOf, tmp_path: Path) -> None:
    put = store.put("run/deltas/step_000001.safetensors", file_of(BODY))
    fetched = store.fetch(put.key, tmp_path / "out" / "file", size_bytes=put.bytes)

    assert (tmp_path / "out" / "file").read_bytes() == BODY
    assert put.bytes == fetched.bytes == len(BODY)
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "file"]


def test_an_empty_file_can_be_stored(store: Store, file_of: FileOf, tmp_path: Path) -> None:
    store.put("empty.json", file_of(b""))
    store.fetch("empty.json", tmp_path / "empty")

    assert (tmp_path / "empty").read_bytes() == b""


def test_a_hash_the_store_gave_back_speeds_the_fetch_and_changes_nothing(
    store: Store, file_of: FileOf, tmp_path: Path
) -> None:
    put = store.put("a.safetensors", file_of(BODY))
    store.fetch("a.safetensors", tmp_path / "a", size_bytes=put.bytes, xet_hash=put.xet_hash)

    assert (tmp_path / "a").read_bytes() == BODY


def test_a_key_is_written_once(store: Store, file_of: FileOf) -> None:
    store.put("a.safetensors", file_of(b"first"))

    with pytest.raises(ObjectExists, match=r"a\.safetensors"):
        store.put("a.safetensors", file_of(b"second"))
    assert store.read("a.safetensors")[0] == b"first"


def test_a_missing_object_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match="nothing"):
        store.fetch("nothing", tmp_path / "x")
    with pytest.raises(ObjectMissing, match="nothing"):
        store.read("nothing")
    assert store.stat("nothing") is None
    assert not (tmp_path / "x").exists()


def test_more_bytes_than_announced_are_refused(
    store: Store, file_of: FileOf, tmp_path: Path
) -> None:
    store.put("big", file_of(BODY))

    with pytest.raises(StoreError, match="big"):
        store.fetch("big", tmp_path / "x", size_bytes=len(BODY) - 1)
    with pytest.raises(StoreError, match="big"):
        store.read("big", max_bytes=len(BODY) - 1)
    assert not (tmp_path / "x").exists()


def test_a_fetch_replaces_the_target_whole(store: Store, file_of: FileOf, tmp_path: Path) -> None:
    store.put("a", file_of(BODY))
    (tmp_path / "target").write_bytes(b"something longer" * 10_000)
    store.fetch("a", tmp_path / "target")

    assert (tmp_path / "target").read_bytes() == BODY


def test_swap_writes_only_over_what_it_was_shown(store: Store) -> None:
    first = store.swap("latest.json", b"1", expect=None)
    assert first.etag is not None
    second = store.swap("latest.json", b"2", expect=first.etag)

    body, info = store.read("latest.json")
    assert body == b"2"
    assert info.etag == second.etag != first.etag


def test_a_swap_that_comes_late_is_fenced(store: Store) -> None:
    first = store.swap("latest.json", b"1", expect=None)
    store.swap("latest.json", b"2", expect=first.etag)

    with pytest.raises(Fenced, match=r"latest\.json"):
        store.swap("latest.json", b"3", expect=first.etag)
    with pytest.raises(Fenced, match=r"latest\.json"):
        store.swap("latest.json", b"3", expect=None)
    assert store.read("latest.json")[0] == b"2"


def test_a_swap_of_what_was_removed_is_fenced(store: Store) -> None:
    first = store.swap("latest.json", b"1", expect=None)
    store.delete(["latest.json"])

    with pytest.raises(Fenced):
        store.swap("latest.json", b"2", expect=first.etag)
    assert store.stat("latest.json") is None


def test_listing_is_sorted_and_by_prefix(store: Store, file_of: FileOf) -> None:
    for key in ("run/b", "run/a", "run/sub/c", "runner", "other/d"):
        store.put(key, file_of(key.encode()))

    assert [info.key for info in store.list("run/")] == ["run/a", "run/b", "run/sub/c"]
    assert [info.key for info in store.list("run")] == ["run/a", "run/b", "run/sub/c", "runner"]
    assert len(store.list()) == 5
    assert store.list("no/such/place") == []
    assert [info.bytes for info in store.list("other/")] == [len("other/d")]


def test_deleting_is_final_and_forgiving(store: Store, file_of: FileOf) -> None:
    store.put("a", file_of(b"1"))
    store.put("b", file_of(b"2"))
    store.delete(["a", "was/never/there"])
    store.delete([])

    assert [info.key for info in store.list()] == ["b"]
    with pytest.raises(ObjectMissing):
        store.read("a")


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_is_not_plain_is_refused_everywhere(
    store: Store, file_of: FileOf, tmp_path: Path, key: str
) -> None:
    with pytest.raises(InvalidKey):
        store.put(key, file_of(b"x"))
    with pytest.raises(InvalidKey):
        store.fetch(key, tmp_path / "x")
    with pytest.raises(InvalidKey):
        store.read(key)
    with pytest.raises(InvalidKey):
        store.swap(key, b"x", expect=None)
    with pytest.raises(InvalidKey):
        store.stat(key)
    with pytest.raises(InvalidKey):
        store.delete([key])


def test_a_second_handle_sees_the_same_bucket(
    store: Store, open_again: Callable[[], Store], file_of: FileOf
) -> None:
    store.put("a", file_of(BODY))
    second = open_again()

    assert second.uri == store.uri
    assert second.read("a")[0] == BODY
    second.close()


def test_of_many_writers_that_saw_the_same_object_one_wins(
    store: Store, open_again: Callable[[], Store]
) -> None:
    if store.uri.startswith("hf://"):
        pytest.skip("the Hub has no conditional write; what it has instead is in test_lease.py")
    seen = store.swap("latest.json", b"0", expect=None).etag
    handles = [open_again() for _ in range(3)]

    def write(number: int) -> bool:
        try:
            handles[number].swap("latest.json", f"writer {number}".encode(), expect=seen)
        except Fenced:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(write, range(3)))

    assert sum(won) == 1
    assert store.read("latest.json")[0] == f"writer {won.index(True)}".encode()
    for handle in handles:
        handle.close()


def test_the_budget_counts_calls(store: Store) -> None:
    before = store.budget().calls
    store.stat("a")
    store.list()

    budget = store.budget()
    assert budget.calls >= before + 2
    assert budget.window_s == 300.0
