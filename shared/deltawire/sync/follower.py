"""Follow a run: from latest.json to verified files on this disk, for an engine to stage.

Guarantees: what `fetch` and `model_dir` return has the sha256 that the chain promised; file names
on this side are made here, never taken from the bucket; nothing larger than the run's own layout
allows is downloaded; nothing outside the configured store and run is asked for. Does not decide
*when* to look (the replica does) nor touch weights (the engine does).
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from deltawire.codec.adapter import check_adapter
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import Head, Link, ModelFile, RunManifest, Shard, plan_route
from deltawire.protocol.control import WeightNotice
from deltawire.protocol.errors import (
    ChecksumMismatch,
    InvalidKey,
    LayoutMismatch,
    MalformedMessage,
    ObjectMissing,
)
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
_HEADER_ROOM_BYTES = 128 * 2**20
"""What an object may weigh beyond the dense weights: safetensors' header cap and streams' ends."""
_PIECE_BYTES = 4 * 2**20

Fetched = list[tuple[Link, Path]]
"""A route as files, in order. A sharded object has one entry per shard, each with its link."""


class Follower:
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
            body, _ = self.store.read(in_run(self.run_id, RUN_KEY), max_bytes=_HEADER_ROOM_BYTES)
            manifest = parse_manifest(body, run_id=self.run_id)
            layout = Layout(manifest.tensors)
            if layout.digest != manifest.layout_digest:
                raise LayoutMismatch(
                    f"{RUN_KEY}: its tensors have layout digest {layout.digest}, it says "
                    f"{manifest.layout_digest}"
                )
            if manifest.adapter is not None:
                check_adapter(layout, manifest.adapter)
            self._manifest = manifest
        return self._manifest

    def layout(self) -> Layout:
        """The run's tensors, in order."""
        return Layout(self.manifest().tensors)

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

    def route(self, have: int | None, want: int) -> list[Link]:
        """The cheapest links from the version held to the one wanted, by the newest head seen.

        Raises VersionGap when none lead there.
        """
        head = self._newest or self.head()
        return plan_route(head.links, have=have, want=want)

    def fetch(self, links: Sequence[Link]) -> Fetched:
        """Download what is not cached, check every file, forget what the route does not need.

        Raises ObjectMissing (collected meanwhile: look at the head again), ChecksumMismatch,
        MalformedMessage for a size the layout forbids, StoreUnavailable.
        """
        limit = self.layout().nbytes + _HEADER_ROOM_BYTES
        wanted = [(link, shard) for link in links for shard in _files(link)]
        for link, _ in wanted:
            if link.bytes > limit:
                raise MalformedMessage(
                    f"{link.key}: {link.bytes} bytes announced, {limit} are possible"
                )
        fetched = [(link, self._object(shard)) for link, shard in wanted]
        self._forget_all_but({path for _, path in fetched})
        return fetched

    def model_dir(self) -> Path:
        """A folder with the run's configuration and tokenizer files, each verified."""
        folder = self._cache / "model" / self.manifest().layout_digest[:16]
        for file in self.manifest().model_files:
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

    def _object(self, shard: Shard) -> Path:
        path = self._cache / "objects" / f"{shard.sha256}.safetensors"
        key = in_run(self.run_id, shard.key)
        self._verified(key, path, shard.sha256, shard.bytes, xet_hash=shard.xet_hash)
        return path

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
        part = path.with_name(f".{secrets.token_hex(6)}.part")
        try:
            self.store.fetch(key, part, size_bytes=size_bytes, xet_hash=xet_hash)
            found = sha256_of(part)
            if found != sha256:
                raise ChecksumMismatch(key, expected=sha256, actual=found)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _forget_all_but(self, needed: set[Path]) -> None:
        """Keep the cache to what the newest head still names, and to this route."""
        named = {
            f"{shard.sha256}.safetensors"
            for link in (self._newest.links if self._newest else [])
            for shard in _files(link)
        }
        for path in (self._cache / "objects").glob("*.safetensors"):
            if path not in needed and path.name not in named:
                path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _files(link: Link) -> list[Shard]:
    """An object's files: its shards, or the one file it is."""
    whole = Shard(key=link.key, bytes=link.bytes, sha256=link.sha256, xet_hash=link.xet_hash)
    return list(link.shards) or [whole]


def _age(head: Head) -> tuple[int, int]:
    return head.epoch, head.version
