"""One object of the chain into the store, and the link that latest.json will carry for it."""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

from deltawire.codec.anchor import write_anchor_shards
from deltawire.codec.bits import BitArray
from deltawire.codec.decode import read_header
from deltawire.codec.digest import Digest
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import Link, Shard
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind, in_run, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.options import PublishOptions
from deltawire.sync.reader import sha256_of


def upload_object(
    store: Store, path: Path, header: ObjectHeader, *, kind: ObjectKind, epoch: int
) -> Link:
    """Upload one finished file under its own key. Nobody follows it until its link is committed."""
    base = header.base_version if kind is ObjectKind.SKIP else None
    key = object_key(kind, header.model_version, epoch=epoch, base=base)
    return _link(header, kind, [_upload(store, path, header.run_id, key)])


def upload_anchor(
    store: Store,
    bits: Mapping[str, BitArray],
    *,
    layout: Layout,
    version: PolicyVersion,
    run_id: str,
    digest: Digest,
    epoch: int,
    options: PublishOptions,
    folder: Path,
) -> Link:
    """Write every tensor into files in `folder`, one if they fit in one, and upload them."""
    header = ObjectHeader(
        sparse=False, model_version=version, run_id=run_id, new_digest=str(digest)
    )
    paths = write_anchor_shards(
        bits.items(),
        header,
        lambda number, count: folder / f"anchor-{number}-of-{count}.safetensors",
        layout=layout,
        max_shard_bytes=options.anchor_shard_bytes,
        packed=options.anchor_packed,
    )
    kind, count = ObjectKind.ANCHOR, len(paths)
    shards = [
        _upload(
            store,
            path,
            run_id,
            object_key(kind, version, epoch=epoch, shard=(number, count) if count > 1 else None),
        )
        for number, path in enumerate(paths, start=1)
    ]
    return _link(read_header(paths[0]), kind, shards)


def _upload(store: Store, path: Path, run_id: str, key: str) -> Shard:
    sha256 = sha256_of(path)
    info = store.put(in_run(run_id, key), path)
    return Shard(key=key, bytes=info.bytes, sha256=sha256, xet_hash=info.xet_hash)


def _link(header: ObjectHeader, kind: ObjectKind, shards: list[Shard]) -> Link:
    whole = len(shards) == 1
    joined = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
    return Link(
        version=header.model_version,
        kind=kind,
        key=shards[0].key,
        base_version=header.base_version,
        bytes=sum(shard.bytes for shard in shards),
        sha256=shards[0].sha256 if whole else joined,
        new_digest=header.new_digest,
        encoding=header.encoding,
        changed=header.num_changed if header.sparse else header.total_elements,
        total=header.total_elements,
        shards=[] if whole else shards,
        xet_hash=shards[0].xet_hash if whole else None,
        created_at=time.time(),
    )
