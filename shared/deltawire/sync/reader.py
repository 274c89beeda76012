"""Read a run without its weights: what is committed, configuration and tokenizer. No torch.

Guarantees: files that come back have the sha256 that run.json or latest.json promised; file names
on this side are made here, never taken from the bucket; nothing outside the configured store and
run is asked for. For weights there is Follower (follower.py).
"""

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deltawire.protocol.chain import Head, ModelFile, RunManifest
from deltawire.protocol.control import WeightNotice
from deltawire.protocol.errors import ChecksumMismatch, InvalidKey, MalformedMessage, ObjectMissing
from deltawire.protocol.layout import (
    LATEST_KEY,
    RUN_KEY,
    check_run_id,
    in_run,
    model_file_key,
    parse_key,
)
from deltawire.store.base import Store, Watch, Watchable
from deltawire.sync.heads import parse_head, parse_manifest

MAX_MODEL_FILE_BYTES = 256 * 2**20
"""No configuration or tokenizer file is larger; weights do not travel as model files."""
_MANIFEST_BYTES = 128 * 2**20
"""run.json names every tensor; no model's is larger."""
_ABANDONED_S = 3600.0
"""A file on its way here that has not grown for so long belongs to a process that is gone."""


class RunReader:
    """One run, read-only. Sync code; calls may come from several threads."""

    def __init__(self, store: Store, run_id: str, cache_dir: Path) -> None:
        self.store = store
        self.run_id = check_run_id(run_id)
        self._cache = cache_dir
        self._manifest: RunManifest | None = None
        self._newest: Head | None = None

    def manifest(self) -> RunManifest:
        """run.json. Immutable, so it is read once. ObjectMissing until the run was opened."""
        if self._manifest is None:
            body, _ = self.store.read(in_run(self.run_id, RUN_KEY), max_bytes=_MANIFEST_BYTES)
            manifest = parse_manifest(body, run_id=self.run_id)
            self._check(manifest)
            self._manifest = manifest
        return self._manifest

    def head(self) -> Head:
        """The newest committed state that was ever seen.

        An answer older than one seen before (a replayed or late read) is passed over. Raises
        ObjectMissing while nothing is committed, MalformedMessage or UnknownSchema for a
        latest.json that cannot be believed.
        """
        body, _ = self.store.read(in_run(self.run_id, LATEST_KEY))
        head = parse_head(body, run_id=self.run_id)
        if not head.links:
            raise ObjectMissing(f"run {self.run_id!r} has no committed version yet")
        if self._newest is None or _age(head) >= _age(self._newest):
            self._newest = head
        return self._newest

    def model_dir(self) -> Path:
        """A folder with the run's configuration and tokenizer files, each verified."""
        manifest = self.manifest()
        name = hashlib.sha256(manifest.layout_digest.encode()).hexdigest()[:16]
        folder = self._cache / "model" / name
        for file in manifest.model_files:
            self._model_file(file, folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def watch(self, wake: Callable[[], object]) -> Watch | None:
        """Have `wake` called, from another thread, when latest.json may have changed.

        None where the store cannot tell. Only a hint: poll as well.
        """
        if not isinstance(self.store, Watchable):
            return None
        return self.store.watch(in_run(self.run_id, LATEST_KEY), wake)

    def accepts(self, notice: WeightNotice) -> bool:
        """Whether a notice speaks of this store and of an object of this run. It is only a hint."""
        prefix = in_run(self.run_id, "")
        if notice.repo_id != self.store.uri or not notice.filename.startswith(prefix):
            return False
        try:
            parse_key(notice.filename.removeprefix(prefix))
        except InvalidKey:
            return False
        return True

    def _check(self, manifest: RunManifest) -> None:
        """Whatever more a reader asks of run.json before it believes it."""

    def _model_file(self, file: ModelFile, folder: Path) -> None:
        if file.bytes > MAX_MODEL_FILE_BYTES:
            raise MalformedMessage(
                f"{file.name}: {file.bytes} bytes announced, {MAX_MODEL_FILE_BYTES} are possible"
            )
        key = in_run(self.run_id, model_file_key(file.name))
        self._verified(key, folder / file.name, file.sha256, file.bytes)

    def _verified(
        self, key: str, path: Path, sha256: str, size_bytes: int, *, xet_hash: str | None = None
    ) -> None:
        """See that `path` holds the promised bytes, from the cache or the store."""
        if path.is_file() and sha256_of(path) == sha256:
            os.utime(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_abandoned(path.parent)
        part = path.with_name(f".{secrets.token_hex(6)}.part")
        try:
            self.store.fetch(key, part, size_bytes=size_bytes, xet_hash=xet_hash)
            found = sha256_of(part)
            if found != sha256:
                raise ChecksumMismatch(key, expected=sha256, actual=found)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _forget_abandoned(folder: Path) -> None:
    """Remove what killed processes left half fetched."""
    for part in folder.glob(".*.part"):
        with suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


def _age(head: Head) -> tuple[int, int]:
    return head.epoch, head.version
