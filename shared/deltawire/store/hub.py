"""A storage bucket of the Hugging Face Hub: `hf://buckets/owner/name/prefix`.

Only public functions that huggingface_hub has from 1.31 on are called. What differs from the other
stores, because a Hub bucket has neither conditional writes nor transactions:

* `put` looks, uploads and looks again: two writers of one key at the same moment are not told
  apart, but what is there afterwards is verified by xet hash and size.
* `swap` compares, writes under a lease object and verifies after the write (see lease.py). That
  fences a second trainer unless its write stalls for longer than the settling time between its
  look and its landing; the sha256 of every object still keeps readers from using a wrong file.

The etag of an object is its xet hash, which is a hash of its bytes. New buckets are private.
Progress bars are turned off for the whole process: services log instead.
"""

import json
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import hf_xet
from huggingface_hub import BucketFile, HfApi, get_token
from huggingface_hub.errors import (
    BucketNotFoundError,
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars
from pydantic import SecretStr

from deltawire.protocol.errors import (
    Fenced,
    ObjectExists,
    ObjectMissing,
    SettingsError,
    StoreError,
    StoreUnavailable,
)
from deltawire.store.base import ObjectInfo, StoreBudget, check_key
from deltawire.store.calls import CallCounter
from deltawire.store.hub_events import ChangeFeed
from deltawire.store.lease import Lease
from deltawire.store.retry import retrying

FREE_CALLS = 1000
"""API calls in five minutes on the free tier; paid plans allow more."""
SETTLE_S = 1.0
"""Longer than a small write takes to land; see lease.py."""
ABANDONED_S = 15.0
_LEASE_SUFFIX = ".lease"
_BUSY = (408, 429, 500, 502, 503, 504)
_FORBIDDEN = (401, 403)

_Result = TypeVar("_Result")


class HubStore:
    """Objects below `prefix` of one bucket."""

    def __init__(
        self,
        bucket_id: str,
        *,
        prefix: str = "",
        token: SecretStr | None = None,
        endpoint: str | None = None,
        settle_s: float = SETTLE_S,
        abandoned_s: float = ABANDONED_S,
    ) -> None:
        disable_progress_bars()
        self._bucket, self._prefix = bucket_id, prefix
        self._settle_s, self._abandoned_s = settle_s, abandoned_s
        secret = token.get_secret_value() if token is not None else None
        self._api = HfApi(endpoint=endpoint, token=secret, library_name="deltawire")
        _refuse_plain_http(self._api.endpoint)
        self._calls = CallCounter(allowed=FREE_CALLS)
        self._writing = threading.Lock()
        self._bucket_made = False
        self._leases: dict[str, Lease] = {}
        self._read: dict[str, tuple[bytes, ObjectInfo]] = {}

    @property
    def uri(self) -> str:
        """``hf://buckets/owner/name/prefix``."""
        return f"hf://buckets/{self._bucket}" + (f"/{self._prefix}" if self._prefix else "")

    def put(self, key: str, source: Path) -> ObjectInfo:
        """Look, upload by path, verify by hash and size."""
        with self._writing:
            if self.stat(key) is not None:
                raise ObjectExists(f"{key} is taken; keys are written once")
            return self._upload(key, source)

    def fetch(
        self, key: str, target: Path, *, size_bytes: int | None = None, xet_hash: str | None = None
    ) -> ObjectInfo:
        """Download by hash when hash and size are known, else look the path up first."""
        if xet_hash is not None and size_bytes is not None:
            info = ObjectInfo(key=check_key(key), bytes=size_bytes, xet_hash=xet_hash)
        else:
            info = self._known(key)
        _refuse_larger(info, size_bytes)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
        try:
            self._download(info, part)
            part.replace(target)
        except OSError as error:
            raise StoreError(f"fetching {key}: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)
        return info

    def read(self, key: str, *, max_bytes: int = 16 * 2**20) -> tuple[bytes, ObjectInfo]:
        """One call when the object is as it was at the last read, three more when it changed."""
        info = self._known(key)
        _refuse_larger(info, max_bytes)
        body, known = self._read.get(key, (b"", None))
        if known is None or known.etag != info.etag:
            with tempfile.TemporaryDirectory(prefix="deltawire-hub-") as folder:
                copy = Path(folder, "body")
                self.fetch(key, copy, size_bytes=info.bytes, xet_hash=info.xet_hash)
                body = copy.read_bytes()
            self._read[key] = (body, info)
        return body, info

    def swap(self, key: str, body: bytes, *, expect: str | None) -> ObjectInfo:
        """Compare and write under a lease, and verify after the write.

        Not a true compare-and-swap: see the module's first lines for what it cannot tell apart.
        """
        with self._writing, tempfile.TemporaryDirectory(prefix="deltawire-hub-") as folder:
            self._lease(key).hold()
            found = self.stat(key)
            if (found.etag if found else None) != expect:
                raise self._fenced(key)
            source = Path(folder, "body")
            source.write_bytes(body)
            try:
                return self._upload(key, source)
            except ObjectExists as error:
                raise self._fenced(key) from error

    def stat(self, key: str) -> ObjectInfo | None:
        """One call."""
        path = self._path(key)

        def look() -> list[BucketFile]:
            self._calls.add()
            return list(self._api.get_bucket_paths_info(self._bucket, [path]))

        try:
            found = self._asked(key, look)
        except ObjectMissing:
            return None
        return self._info(found[0]) if found else None

    def delete(self, keys: Sequence[str]) -> None:
        """One batch, verified."""
        paths = [self._path(key) for key in keys]
        if not paths:
            return

        def there() -> list[str]:
            self._calls.add()
            return [f.path for f in self._api.get_bucket_paths_info(self._bucket, paths)]

        def remove() -> list[str]:
            present = there()
            if present:
                self._calls.add()
                self._api.batch_bucket_files(self._bucket, delete=present)
            return there() if present else []

        try:
            left = self._asked("objects to delete", remove)
        except ObjectMissing:
            return
        if left:
            raise StoreError(f"{self.uri}: {left[0]} could not be deleted")

    def budget(self) -> StoreBudget:
        """Calls to the Hub's API in its five-minute window."""
        return self._calls.budget()

    def watch(self, key: str, wake: Callable[[], object]) -> ChangeFeed:
        """Follow the bucket's change feed. Costs no calls of the budget while it is open."""
        url = f"{self._api.endpoint}/api/buckets/{self._bucket}/events"
        token = self._api.token if isinstance(self._api.token, str) else get_token()
        return ChangeFeed(url, token=token, path=self._path(key), wake=wake)

    def close(self) -> None:
        """The Hub's client keeps its own pool for the process."""

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Walks the folder that `prefix` names, page by page."""
        folder = "/".join(part for part in (self._prefix, prefix.rpartition("/")[0]) if part)

        def walk() -> list[BucketFile]:
            self._calls.add()
            tree = self._api.list_bucket_tree(self._bucket, folder or None, recursive=True)
            return [entry for entry in tree if isinstance(entry, BucketFile)]

        try:
            found = self._asked(f"objects under {prefix!r}", walk)
        except ObjectMissing:
            return []
        infos = [self._info(file) for file in found]
        return sorted(
            (
                info
                for info in infos
                if info.key.startswith(prefix) and not info.key.endswith(_LEASE_SUFFIX)
            ),
            key=lambda info: info.key,
        )

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._prefix}/{key}" if self._prefix else key

    def _info(self, file: BucketFile) -> ObjectInfo:
        key = file.path.removeprefix(f"{self._prefix}/") if self._prefix else file.path
        modified = file.uploaded_at or file.mtime
        return ObjectInfo(
            key=key,
            bytes=file.size,
            xet_hash=file.xet_hash,
            etag=file.xet_hash,
            modified_at=modified.timestamp() if modified else 0.0,
        )

    def _known(self, key: str) -> ObjectInfo:
        info = self.stat(key)
        if info is None:
            raise ObjectMissing(f"no object {key!r} in {self.uri}")
        return info

    def _upload(self, key: str, source: Path) -> ObjectInfo:
        """Upload and verify. ObjectExists when something else stands there afterwards."""
        path = self._path(key)
        wanted = hf_xet.hash_files([str(source)])[0]
        self._make_bucket()

        def send() -> None:
            self._calls.add(2)  # a write token and the batch
            self._api.batch_bucket_files(self._bucket, add=[(str(source), path)])

        self._asked(key, send)
        info = self.stat(key)
        if info is None:
            raise StoreUnavailable(f"{key} was uploaded to {self.uri} and is not there")
        if (info.xet_hash, info.bytes) != (wanted.hash, wanted.file_size):
            raise ObjectExists(f"{key} in {self.uri} was written by another writer meanwhile")
        return info

    def _download(self, info: ObjectInfo, target: Path) -> None:
        file = BucketFile(
            type="file", path=self._path(info.key), size=info.bytes, xetHash=info.xet_hash
        )

        def load() -> None:
            self._calls.add(2)  # the file's refresh route and a read token
            self._api.download_bucket_files(
                self._bucket, [(file, target)], raise_on_missing_files=True
            )

        self._asked(info.key, load)
        found = target.stat().st_size
        if found != info.bytes:
            raise StoreError(f"{info.key}: {info.bytes} bytes expected, {found} came")

    def _make_bucket(self) -> None:
        """Private by default; one that exists stays as it is."""
        if self._bucket_made:
            return

        def make() -> None:
            self._calls.add()
            self._api.create_bucket(self._bucket, private=True, exist_ok=True)

        self._asked("the bucket", make)
        self._bucket_made = True

    def _lease(self, key: str) -> Lease:
        if key not in self._leases:
            self._leases[key] = Lease(
                _HubLeaseObject(self, key + _LEASE_SUFFIX),
                name=key,
                settle_s=self._settle_s,
                abandoned_s=self._abandoned_s,
            )
        return self._leases[key]

    def _fenced(self, key: str) -> Fenced:
        return Fenced(f"{key} in {self.uri} was changed by another writer; this one must stop")

    def _asked(self, key: str, call: Callable[[], _Result]) -> _Result:
        """A call with our errors, repeated with jitter while the Hub is busy or away."""

        def once() -> _Result:
            with self._translated(key):
                return call()

        return retrying(once)

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        where = f"{key} in {self.uri}"
        try:
            yield
        except (BucketNotFoundError, RepositoryNotFoundError) as error:
            raise ObjectMissing(
                f"{where}: there is no such bucket, or the token may not see it"
            ) from error
        except EntryNotFoundError as error:
            raise ObjectMissing(f"no object {where}") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in _BUSY:
                raise StoreUnavailable(f"{where}: the Hub answered {status}") from error
            hint = "; check what the token may do" if status in _FORBIDDEN else ""
            raise StoreError(f"{where}: the Hub answered {status}{hint}") from error
        except HTTPError as error:
            raise StoreUnavailable(f"{where}: {type(error).__name__}") from error
        except hf_xet.XetObjectNotFoundError as error:
            raise ObjectMissing(f"no bytes for {where}") from error
        except (RuntimeError, OSError) as error:
            # What goes wrong inside hf_xet's transfer: also refused tokens and cut connections.
            raise StoreUnavailable(f"{where}: transfer failed: {error}") from error


class _HubLeaseObject:
    """The lease of one key, as an object beside it."""

    def __init__(self, store: HubStore, key: str) -> None:
        self._store, self._key = store, key

    def look(self) -> str | None:
        info = self._store.stat(self._key)
        return info.etag if info else None

    def write(self) -> str:
        with tempfile.TemporaryDirectory(prefix="deltawire-hub-") as folder:
            source = Path(folder, "lease")
            source.write_text(json.dumps({"nonce": secrets.token_hex(16)}))
            etag: str = hf_xet.hash_files([str(source)])[0].hash
            # Somebody may write it at the same time: the second look tells whose nonce stands.
            with suppress(ObjectExists):
                self._store._upload(self._key, source)
            return etag


def _refuse_plain_http(endpoint: str) -> None:
    """A token must not travel in the clear to another machine."""
    parts = urlsplit(endpoint)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise SettingsError(f"HF_ENDPOINT {endpoint}: expected https, or a server on this machine")


def _refuse_larger(info: ObjectInfo, allowed_bytes: int | None) -> None:
    if allowed_bytes is not None and info.bytes > allowed_bytes:
        raise StoreError(
            f"{info.key} has {info.bytes} bytes, at most {allowed_bytes} were expected"
        )
