"""One object of the chain into the store, and the link that latest.json will carry for it."""

import time
from collections.abc import Mapping
from pathlib import Path

from deltawire.codec.anchor import write_anchor
from deltawire.codec.bits import BitArray
from deltawire.codec.decode import read_header
from deltawire.codec.digest import Digest
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import Link
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind, in_run, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.follower import sha256_of


def upload_object(
    store: Store, path: Path, header: ObjectHeader, *, kind: ObjectKind, epoch: int
) -> Link:
    """Upload one finished file under its own key. Nobody follows it until its link is committed."""
    base = header.base_version if kind is ObjectKind.SKIP else None
    key = object_key(kind, header.model_version, epoch=epoch, base=base)
    sha256 = sha256_of(path)
    info = store.put(in_run(header.run_id, key), path)
    return Link(
        version=header.model_version,
        kind=kind,
        key=key,
        base_version=header.base_version,
        bytes=info.bytes,
        sha256=sha256,
        new_digest=header.new_digest,
        encoding=header.encoding,
        changed=header.num_changed,
        total=header.total_elements,
        xet_hash=info.xet_hash,
        created_at=time.time(),
    )


def upload_anchor(
    store: Store,
    bits: Mapping[str, BitArray],
    *,
    layout: Layout,
    version: PolicyVersion,
    run_id: str,
    digest: Digest,
    epoch: int,
    packed: bool,
    folder: Path,
) -> Link:
    """Write every tensor into one file in `folder`, and upload it."""
    header = ObjectHeader(
        sparse=False, model_version=version, run_id=run_id, new_digest=str(digest)
    )
    path = folder / "anchor.safetensors"
    write_anchor(bits.items(), header, path, layout=layout, packed=packed)
    return upload_object(store, path, read_header(path), kind=ObjectKind.ANCHOR, epoch=epoch)
