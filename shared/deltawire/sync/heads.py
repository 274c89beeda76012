"""latest.json and run.json from bytes, believed only as far as they can be checked.

Both come from a bucket that others may write to. A key, version, size or run that does not fit is
a typed error that names the field; it never becomes a path, a download or an allocation.
"""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from deltawire.protocol.chain import CHAIN_SCHEMA, Head, Link, RunManifest
from deltawire.protocol.errors import InvalidKey, MalformedMessage, UnknownSchema
from deltawire.protocol.layout import LATEST_KEY, RUN_KEY, ObjectKind, model_file_key, parse_key

_HEX = frozenset("0123456789abcdef")
_SHA256_CHARS = 64

_Message = TypeVar("_Message", Head, RunManifest)


def parse_head(body: bytes, *, run_id: str) -> Head:
    """latest.json of this run. Raises MalformedMessage or UnknownSchema; never InvalidKey."""
    head = _parse(Head, body, run_id=run_id, name=LATEST_KEY)
    for link in head.links:
        _check_link(link, head)
    leads = any(link.version == head.version for link in head.links)
    if head.links and not leads:
        raise _lie(f"no link leads to its version {head.version}", body)
    return head


def parse_manifest(body: bytes, *, run_id: str) -> RunManifest:
    """run.json of this run. Raises MalformedMessage or UnknownSchema."""
    manifest = _parse(RunManifest, body, run_id=run_id, name=RUN_KEY)
    for file in manifest.model_files:
        try:
            model_file_key(file.name)
        except InvalidKey as error:
            raise MalformedMessage(f"{RUN_KEY}: {error}", raw=body) from error
        if not _is_sha256(file.sha256) or file.bytes < 0:
            raise MalformedMessage(f"{RUN_KEY}: {file.name} has no sha256 and size", raw=body)
    return manifest


def _parse(kind: type[_Message], body: bytes, *, run_id: str, name: str) -> _Message:
    try:
        message = kind.model_validate_json(body)
    except ValidationError as error:
        raise MalformedMessage(f"{name}: {_first(error)}", raw=body) from error
    if message.schema_number != CHAIN_SCHEMA:
        raise UnknownSchema(
            f"{name}: schema {message.schema_number}, this version reads {CHAIN_SCHEMA}; upgrade"
        )
    if message.run_id != run_id:
        raise MalformedMessage(
            f"{name}: expected run {run_id!r}, found run {message.run_id!r}", raw=body
        )
    return message


def _check_link(link: Link, head: Head) -> None:
    """A link must be what its key says, lead forward, and carry what it is checked against."""
    try:
        parsed = parse_key(link.key)
        for shard in link.shards:
            _check_shard(link, shard.key)
    except InvalidKey as error:
        raise MalformedMessage(f"{LATEST_KEY}: {error}") from error
    sizes = [link.bytes, *(shard.bytes for shard in link.shards)]
    hashes = [link.sha256, *(shard.sha256 for shard in link.shards)]
    based = link.base_version is not None
    may_be_based = link.kind in (ObjectKind.DELTA, ObjectKind.SKIP)
    fine = (
        (parsed.kind, parsed.version) == (link.kind, link.version)
        and (parsed.base is None or parsed.base == link.base_version)
        and (based == may_be_based or link.kind is ObjectKind.ADAPTER)
        and (link.base_version is None or 0 <= link.base_version < link.version)
        and link.version <= head.version
        and all(size >= 0 for size in sizes)
        and all(_is_sha256(value) for value in hashes)
        and (not link.shards or sum(shard.bytes for shard in link.shards) == link.bytes)
    )
    if not fine:
        raise _lie(f"{link.key} does not fit its version, base, size or hash")


def _check_shard(link: Link, key: str) -> None:
    shard, first = parse_key(key), parse_key(link.key)
    if (shard.kind, shard.version, shard.epoch) != (first.kind, first.version, first.epoch):
        raise InvalidKey(f"{key!r} is not a shard of {link.key!r}")


def _is_sha256(value: str) -> bool:
    return len(value) == _SHA256_CHARS and _HEX.issuperset(value)


def _lie(reason: str, raw: bytes = b"") -> MalformedMessage:
    return MalformedMessage(f"{LATEST_KEY}: {reason}", raw=raw)


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or 'not JSON'}: {found['msg']}"


def as_bytes(message: BaseModel) -> bytes:
    """The JSON that is stored."""
    return message.model_dump_json(exclude_none=True).encode()
