"""An S3 bucket, or what speaks S3 (the Hub's gateway, MinIO, Garage, R2): `s3://bucket/prefix`.

Guarantees: an object appears whole or not at all (one PutObject); a taken key is refused by
`If-None-Match: *`; `swap` is a true compare-and-swap by `If-Match`. A server that ignores these
headers would lose that, so the first write asks it (see `_check_conditions`). One PutObject carries
at most 5 GiB; larger anchors must be written in shards.

Keys, region and endpoint come from the usual AWS variables and files (AWS_ENDPOINT_URL_S3,
AWS_REGION, ...), or endpoint and region from the URI.
"""

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError

from deltawire.protocol.errors import (
    Fenced,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
)
from deltawire.store.base import ObjectInfo, StoreBudget, check_key
from deltawire.store.calls import CallCounter

MAX_OBJECT_BYTES = 5 * 2**30
"""What one PutObject carries."""
_TIMEOUT_S = 60
_ATTEMPTS = 6
"""botocore's own back-off with jitter covers 429, 5xx and broken connections."""
_PIECE_BYTES = 4 * 2**20
_DELETE_AT_ONCE = 1000

_MISSING = ("404", "NoSuchKey", "NotFound")
_CONDITION = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")
_BUSY = ("429", "500", "502", "503", "504", "SlowDown", "InternalError", "ServiceUnavailable")
_PROBE_PREFIX = ".deltawire-probe-"


class S3Store:
    """Objects below `prefix` of one bucket. The etag is S3's own."""

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint_url: str | None = None,
        region: str | None = None,
    ) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._query = urlencode(
            {k: v for k, v in (("endpoint_url", endpoint_url), ("region", region)) if v}
        )
        self._calls = CallCounter()
        self._conditions_hold = False
        self._read: dict[str, tuple[bytes, ObjectInfo]] = {}
        """Objects that were read whole, as they were."""
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint_url,
            region_name=region,
            config=Config(
                connect_timeout=_TIMEOUT_S,
                read_timeout=_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
                s3={"addressing_style": "path" if endpoint_url else "auto"},
                # Older S3-likes know no checksum trailers; ours are checked by sha256 anyway.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix``; the endpoint is part of it when it was given in the URI."""
        path = f"/{self._prefix}" if self._prefix else ""
        return f"s3://{self._bucket}{path}" + (f"?{self._query}" if self._query else "")

    def put(self, key: str, source: Path) -> ObjectInfo:
        """One conditional PutObject."""
        size = source.stat().st_size
        if size > MAX_OBJECT_BYTES:
            raise StoreError(
                f"{key}: {size} bytes, one S3 upload carries {MAX_OBJECT_BYTES}; write shards"
            )
        name = self._name(key)
        self._check_conditions()
        try:
            with self._translated(key), source.open("rb") as body:
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=name, Body=body, IfNoneMatch="*"
                )
        except Fenced as error:
            written = self._written_by_an_earlier_attempt(key, source, error.__cause__)
            if written is None:
                raise ObjectExists(f"{key} is taken; keys are written once") from error
            return written
        return ObjectInfo(key=key, bytes=size, etag=answer["ETag"])

    def fetch(
        self, key: str, target: Path, *, size_bytes: int | None = None, xet_hash: str | None = None
    ) -> ObjectInfo:
        """One GetObject, through a temporary file beside `target`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
        name = self._name(key)
        try:
            with self._translated(key), part.open("xb") as written:
                answer = self._client.get_object(Bucket=self._bucket, Key=name)
                info = _info(key, answer, size=answer["ContentLength"])
                _refuse_larger(info, size_bytes)
                for piece in answer["Body"].iter_chunks(_PIECE_BYTES):
                    written.write(piece)
            part.replace(target)
        except OSError as error:
            raise StoreError(f"fetching {key}: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)
        return info

    def read(self, key: str, *, max_bytes: int = 16 * 2**20) -> tuple[bytes, ObjectInfo]:
        """A small object whole; its bytes travel only when it changed since the last read."""
        name, known = self._name(key), self._read.get(key)
        condition = {} if known is None else {"IfNoneMatch": known[1].etag}
        with self._translated(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=name, **condition)
            except ClientError as error:
                if known is None or _status(error) != "304":
                    raise
                return known
            info = _info(key, answer, size=answer["ContentLength"])
            _refuse_larger(info, max_bytes)
            self._read[key] = (answer["Body"].read(), info)
            return self._read[key]

    def swap(self, key: str, body: bytes, *, expect: str | None) -> ObjectInfo:
        """PutObject under `If-Match` (or `If-None-Match: *`): a true compare-and-swap."""
        name = self._name(key)
        self._check_conditions()
        condition = {"IfNoneMatch": "*"} if expect is None else {"IfMatch": expect}
        try:
            with self._translated(key):
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=name, Body=body, **condition
                )
        except ObjectMissing as error:
            raise Fenced(f"{key} in {self.uri} was removed; this writer must stop") from error
        return ObjectInfo(key=key, bytes=len(body), etag=answer["ETag"])

    def stat(self, key: str) -> ObjectInfo | None:
        """One HeadObject."""
        name = self._name(key)
        try:
            with self._translated(key):
                answer = self._client.head_object(Bucket=self._bucket, Key=name)
        except ObjectMissing:
            return None
        return _info(key, answer, size=answer["ContentLength"])

    def delete(self, keys: Sequence[str]) -> None:
        """DeleteObjects, a thousand at a time."""
        names = [{"Key": self._name(key)} for key in keys]
        for begin in range(0, len(names), _DELETE_AT_ONCE):
            with self._translated("objects to delete"):
                answer = self._client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": names[begin : begin + _DELETE_AT_ONCE], "Quiet": True},
                )
            if failed := answer.get("Errors"):
                raise StoreError(f"{self.uri}: {failed[0]['Key']}: {failed[0].get('Message')}")

    def budget(self) -> StoreBudget:
        """S3 bills calls and forbids none."""
        return self._calls.budget()

    def close(self) -> None:
        """Close the connection pool."""
        self._client.close()

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """ListObjectsV2, page by page; S3 sorts by key."""
        root = f"{self._prefix}/" if self._prefix else ""
        found = []
        with self._translated(f"objects under {prefix!r}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=root + prefix
            )
            for page in pages:
                self._calls.add()
                found += [
                    _info(row["Key"].removeprefix(root), row, size=row["Size"])
                    for row in page.get("Contents", [])
                ]
        return [info for info in found if not info.key.startswith(_PROBE_PREFIX)]

    def _name(self, key: str) -> str:
        self._calls.add()
        check_key(key)
        return f"{self._prefix}/{key}" if self._prefix else key

    def _written_by_an_earlier_attempt(
        self, key: str, source: Path, error: BaseException | None
    ) -> ObjectInfo | None:
        """A repeated put meets its own first attempt when only the answer to that was lost."""
        if not isinstance(error, ClientError):
            return None
        if not error.response.get("ResponseMetadata", {}).get("RetryAttempts"):
            return None
        with source.open("rb") as content:
            md5 = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False))
        there = self.stat(key)
        return there if there is not None and there.etag == f'"{md5.hexdigest()}"' else None

    def _check_conditions(self) -> None:
        """Ask once whether the server honours conditional puts: write-once and fencing rest on it.

        A fresh probe object is written twice under `If-None-Match: *`; the second must fail.
        """
        if self._conditions_hold:
            return
        name = self._name(_PROBE_PREFIX + secrets.token_hex(8))
        probe = {"Bucket": self._bucket, "Key": name, "Body": b"", "IfNoneMatch": "*"}
        with self._translated("a conditional write"):
            self._client.put_object(**probe)
        try:
            with self._translated("a conditional write"):
                self._client.put_object(**probe)
        except Fenced:
            self._conditions_hold = True
        finally:
            self._client.delete_object(Bucket=self._bucket, Key=name)
        if not self._conditions_hold:
            raise StoreError(
                f"{self.uri} ignores conditional writes (If-None-Match): two trainers could not be "
                "told apart; use a server that honours them"
            )

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """boto's errors become ours. A failed condition is Fenced; `put` makes it ObjectExists."""
        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = _status(error)
            if code in _CONDITION or status == "412":
                raise Fenced(
                    f"{key} in {self.uri} was changed by another writer; this one must stop"
                ) from error
            if code in _MISSING:
                raise ObjectMissing(f"no object {key!r} in {self.uri}") from error
            kind = StoreUnavailable if code in _BUSY or status in _BUSY else StoreError
            raise kind(f"{key} in {self.uri}: {error}") from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"{key} in {self.uri}: {error}") from error


def _status(error: ClientError) -> str:
    return str(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))


def _info(key: str, answer: dict[str, Any], *, size: int) -> ObjectInfo:
    modified = answer.get("LastModified")
    return ObjectInfo(
        key=key,
        bytes=size,
        etag=answer["ETag"],
        modified_at=0.0 if modified is None else modified.timestamp(),
    )


def _refuse_larger(info: ObjectInfo, allowed_bytes: int | None) -> None:
    if allowed_bytes is not None and info.bytes > allowed_bytes:
        raise StoreError(
            f"{info.key} has {info.bytes} bytes, at most {allowed_bytes} were expected"
        )
