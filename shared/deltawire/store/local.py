"""A folder as a bucket: `file:///data/bucket`.

Guarantees: an object appears whole or not at all (temporary file, fsync, rename), also when the
writer is killed; a taken key is refused; `swap` compares and writes under one lock, so of two
writers exactly one wins. Nothing outside the root is read or written, through symlinks neither.
Needs a file system with `flock` and atomic rename: any local disk, a container volume, NFS 4. No
hard links are used, because FUSE mounts have none.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from deltawire.protocol.errors import Fenced, InvalidKey, ObjectExists, ObjectMissing, StoreError
from deltawire.store.base import ObjectInfo, StoreBudget, check_key
from deltawire.store.calls import CallCounter

_PRIVATE = ".deltawire"
"""Folder inside the root for the lock and for files on their way; no key may name it."""
_PIECE_BYTES = 4 * 2**20
_ABANDONED_S = 60.0
"""A file on its way that nobody holds locked and that is this old belongs to a dead writer."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalStore:
    """Objects are files below `root`; the etag of a small object is its sha256."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()
        self._calls = CallCounter()

    @property
    def uri(self) -> str:
        """``file:///data/bucket``."""
        return self._root.as_uri()

    def put(self, key: str, source: Path) -> ObjectInfo:
        """Copy a file in; what is copied is on disk before its name is."""
        target = self._path(key)
        with _translated(f"writing {key} to {self.uri}"):
            if target.exists():
                raise _taken(key)
            with source.open("rb") as content, self._arriving() as (part, written):
                shutil.copyfileobj(content, written, _PIECE_BYTES)
                _to_disk(written)
                with self._locked():
                    if target.exists():
                        raise _taken(key)
                    _publish(part, target)
            return _info(key, target)

    def fetch(
        self, key: str, target: Path, *, size_bytes: int | None = None, xet_hash: str | None = None
    ) -> ObjectInfo:
        """Copy an object out, through a temporary file beside `target`."""
        part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
        with _translated(f"fetching {key} from {self.uri}"):
            with self._opened(key) as content:
                _refuse_larger(key, os.fstat(content.fileno()).st_size, size_bytes)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with part.open("xb") as written:
                        shutil.copyfileobj(content, written, _PIECE_BYTES)
                    part.replace(target)
                finally:
                    part.unlink(missing_ok=True)
            return _info(key, target)

    def read(self, key: str, *, max_bytes: int = 16 * 2**20) -> tuple[bytes, ObjectInfo]:
        """A small object whole."""
        with _translated(f"reading {key} from {self.uri}"), self._opened(key) as content:
            known = os.fstat(content.fileno())
            _refuse_larger(key, known.st_size, max_bytes)
            body = content.read(max_bytes + 1)
        etag = hashlib.sha256(body).hexdigest()
        return body, ObjectInfo(
            key=key, bytes=len(body), sha256=etag, etag=etag, modified_at=known.st_mtime
        )

    def swap(self, key: str, body: bytes, *, expect: str | None) -> ObjectInfo:
        """Compare and write under the root's lock: a true compare-and-swap."""
        target = self._path(key)
        with _translated(f"writing {key} to {self.uri}"):
            with self._arriving() as (part, written):
                written.write(body)
                _to_disk(written)
                with self._locked():
                    found = _etag(target)
                    if found != expect:
                        raise Fenced(
                            f"{key} in {self.uri} was changed by another writer "
                            f"(expected etag {expect}, found {found}); this one must stop"
                        )
                    _publish(part, target)
            etag = hashlib.sha256(body).hexdigest()
            return replace(_info(key, target), sha256=etag, etag=etag)

    def stat(self, key: str) -> ObjectInfo | None:
        """Size and time; neither hash nor etag, which would cost a read."""
        path = self._path(key)
        with _translated(f"looking at {key} in {self.uri}"):
            return _info(key, path) if path.is_file() else None

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files. Their folders stay."""
        for key in keys:
            with _translated(f"removing {key} from {self.uri}"):
                self._path(key).unlink(missing_ok=True)

    def budget(self) -> StoreBudget:
        """A folder allows any number of calls."""
        return self._calls.budget()

    def close(self) -> None:
        """Nothing is held open."""

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Walks only the folder that `prefix` names."""
        self._calls.add()
        folder = self._root / prefix.rpartition("/")[0]
        found = []
        with _translated(f"listing {self.uri}"):
            for parent, folders, names in os.walk(folder):
                folders[:] = [name for name in folders if name != _PRIVATE]
                for name in names:
                    path = Path(parent, name)
                    key = path.relative_to(self._root).as_posix()
                    # A file may be collected between the walk and the look at it.
                    if key.startswith(prefix) and path.is_file():
                        found.append(_info(key, path))
        return sorted(found, key=lambda info: info.key)

    def _path(self, key: str) -> Path:
        """Where a key lies; symlinks resolved, and still below the root."""
        self._calls.add()
        path = self._root / check_key(key)
        inside = path.resolve().is_relative_to(self._root.resolve())
        if not inside or key.split("/", 1)[0] == _PRIVATE:
            raise InvalidKey(f"{key!r} leads out of the bucket {self.uri}")
        return path

    @contextmanager
    def _opened(self, key: str) -> Iterator[BinaryIO]:
        try:
            content = self._path(key).open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectMissing(f"no object {key!r} in {self.uri}") from error
        with content:
            yield content

    @contextmanager
    def _arriving(self) -> Iterator[tuple[Path, BinaryIO]]:
        """A private file on the bucket's own file system, locked while its writer lives."""
        folder = self._root / _PRIVATE / "arriving"
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        part = folder / secrets.token_hex(8)
        try:
            with part.open("xb") as written:
                fcntl.flock(written, fcntl.LOCK_EX)
                yield part, written
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, over all processes. A killed holder's lock is free at once."""
        with (self._root / _PRIVATE / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _publish(part: Path, target: Path) -> None:
    """Make a finished file visible under its name, and see that the name is on disk too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sweep(folder: Path) -> None:
    """Remove what killed writers left behind."""
    for part in folder.iterdir():
        with suppress(FileNotFoundError, BlockingIOError), part.open("rb") as left:
            if time.time() - os.fstat(left.fileno()).st_mtime > _ABANDONED_S:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


def _to_disk(written: BinaryIO) -> None:
    written.flush()
    os.fsync(written.fileno())


def _etag(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _info(key: str, path: Path) -> ObjectInfo:
    known = path.stat()
    return ObjectInfo(key=key, bytes=known.st_size, modified_at=known.st_mtime)


def _taken(key: str) -> ObjectExists:
    return ObjectExists(f"{key} is taken; keys are written once")


def _refuse_larger(key: str, found_bytes: int, allowed_bytes: int | None) -> None:
    if allowed_bytes is not None and found_bytes > allowed_bytes:
        raise StoreError(f"{key} has {found_bytes} bytes, at most {allowed_bytes} were expected")


@contextmanager
def _translated(act: str) -> Iterator[None]:
    """The operating system's errors become one clear StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreError(f"{act}: the disk is full; free space and go on") from error
        raise StoreError(f"{act}: {error.strerror or error}") from error
