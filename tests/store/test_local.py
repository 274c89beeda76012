"""A folder as a bucket: what only a folder can get wrong."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deltawire.protocol.errors import InvalidKey, ObjectMissing, StoreError
from deltawire.store.local import LocalStore


def test_a_symlink_that_leads_out_is_refused(local_root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("private")
    local_root.mkdir()
    (local_root / "door").symlink_to(tmp_path)
    (local_root / "leak").symlink_to(tmp_path / "secret.txt")
    store = LocalStore(local_root)

    for key in ("door/secret.txt", "leak"):
        with pytest.raises(InvalidKey, match="leads out"):
            store.read(key)
    with pytest.raises(InvalidKey, match="leads out"):
        store.swap("door/new.json", b"x", expect=None)
    assert not (tmp_path / "new.json").exists()


def test_a_bucket_behind_a_symlink_works(local_root: Path, tmp_path: Path) -> None:
    local_root.mkdir()
    (tmp_path / "alias").symlink_to(local_root)
    store = LocalStore(tmp_path / "alias")
    store.swap("a", b"1", expect=None)

    assert store.read("a")[0] == b"1"


def test_the_private_folder_is_no_place_for_objects(local_root: Path) -> None:
    store = LocalStore(local_root)
    store.swap("a", b"1", expect=None)

    with pytest.raises(InvalidKey):
        store.read(".deltawire/lock")
    assert [info.key for info in store.list()] == ["a"]


def test_a_folder_is_not_an_object(local_root: Path) -> None:
    store = LocalStore(local_root)
    store.swap("run/a", b"1", expect=None)

    assert store.stat("run") is None
    with pytest.raises(ObjectMissing):
        store.read("run")


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    local_root: Path,
    file_of: Callable[[bytes], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = LocalStore(local_root)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StoreError, match=r"writing a to file://.*: the disk is full"):
        store.put("a", file_of(b"1"))

    assert store.list() == []
    assert list((local_root / ".deltawire" / "arriving").iterdir()) == []


def test_what_a_killed_writer_left_is_invisible_and_swept(
    local_root: Path, file_of: Callable[[bytes], Path]
) -> None:
    store = LocalStore(local_root)
    store.put("a", file_of(b"1"))
    arriving = local_root / ".deltawire" / "arriving"
    for name in ("dead", "alive", "young"):
        (arriving / name).write_bytes(b"half an object")
    for name in ("dead", "alive"):
        os.utime(arriving / name, (0, 0))
    assert [info.key for info in store.list()] == ["a"]

    with (arriving / "alive").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.put("b", file_of(b"2"))

    assert sorted(path.name for path in arriving.iterdir()) == ["alive", "young"]
