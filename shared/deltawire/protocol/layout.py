"""Where things lie in a bucket: keys <-> (kind, version), and nothing else.

Buckets are mutable, unversioned and not transactional. So: keys are written once and never reused;
``latest.json`` is written last and is the only object that changes; a reader follows only what it
names; every object is checked against the sha256 it gives before it is used.
"""

import re
from enum import StrEnum

from deltawire.protocol.errors import InvalidKey
from deltawire.protocol.versions import PolicyVersion
from deltawire.protocol.wire_model import WireModel

RUN_KEY = "run.json"
LATEST_KEY = "latest.json"

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_OBJECT = re.compile(
    r"(?P<folder>anchors|deltas|adapters|skips)/"
    r"(?:from_(?P<base>[0-9]{6,18})_)?step_(?P<version>[0-9]{6,18})(?:\.(?P<epoch>[0-9]{1,18}))?"
    r"(?:-(?P<shard>[0-9]{5})-of-(?P<shards>[0-9]{5}))?\.safetensors"
)
_MODEL_FILE = re.compile(r"model/[A-Za-z0-9][A-Za-z0-9._-]*\.(?:json|txt|jinja|model)")


class ObjectKind(StrEnum):
    """What an object of the chain holds; the value is its folder in singular."""

    ANCHOR = "anchor"
    DELTA = "delta"
    ADAPTER = "adapter"
    SKIP = "skip"
    """Several deltas merged into one, for replicas that are behind."""


class ObjectKey(WireModel):
    """A parsed key. ``parse_key("deltas/step_000011.safetensors")`` has kind delta, version 11."""

    kind: ObjectKind
    version: PolicyVersion
    epoch: int = 1
    """Fencing epoch of the trainer that wrote it, so that a take-over never meets a taken key."""
    base: PolicyVersion | None = None
    shard: int | None = None
    shards: int | None = None


def object_key(
    kind: ObjectKind,
    version: int,
    *,
    epoch: int = 1,
    base: int | None = None,
    shard: tuple[int, int] | None = None,
) -> str:
    """The key of an object, relative to the run.

    ``object_key(ObjectKind.DELTA, 11) == "deltas/step_000011.safetensors"``; a later epoch adds
    ``.2`` before the suffix, a skip file names its base, shard (1, 4) adds ``-00001-of-00004``.
    """
    base_part = "" if base is None else f"from_{base:06d}_"
    epoch_part = "" if epoch == 1 else f".{epoch}"
    shard_part = "" if shard is None else f"-{shard[0]:05d}-of-{shard[1]:05d}"
    return f"{kind}s/{base_part}step_{version:06d}{epoch_part}{shard_part}.safetensors"


def parse_key(key: str) -> ObjectKey:
    """The inverse of ``object_key``. Raises InvalidKey for anything else."""
    match = _OBJECT.fullmatch(key)
    if match is None:
        raise InvalidKey(f"{key!r} is not the key of an anchor, delta, adapter or skip file")
    base, epoch, shard, shards = match.group("base", "epoch", "shard", "shards")
    return ObjectKey(
        kind=ObjectKind(match["folder"].removesuffix("s")),
        version=PolicyVersion(int(match["version"])),
        epoch=1 if epoch is None else int(epoch),
        base=None if base is None else PolicyVersion(int(base)),
        shard=None if shard is None else int(shard),
        shards=None if shards is None else int(shards),
    )


def model_file_key(name: str) -> str:
    """The key of a configuration or tokenizer file. No code and no weights live there."""
    key = f"model/{name}"
    if _MODEL_FILE.fullmatch(key) is None:
        raise InvalidKey(f"{name!r} is not a .json, .txt, .jinja or .model file name")
    return key


def check_run_id(run_id: str) -> str:
    """A run id is one path element or empty (the flat layout). Raises InvalidKey."""
    if run_id and _RUN_ID.fullmatch(run_id) is None:
        raise InvalidKey(
            f"run id {run_id!r}: use lower-case letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return run_id


def in_run(run_id: str, key: str) -> str:
    """A run's key below the bucket prefix; an empty run id is the flat layout."""
    return f"{check_run_id(run_id)}/{key}" if run_id else key
