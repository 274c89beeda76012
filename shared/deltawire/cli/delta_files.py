"""Runs in a store and lone files: what `deltawire deltas` needs to know before it can read them."""

from pathlib import Path

from deltawire.codec.anchor import iter_anchor
from deltawire.codec.container import Container
from deltawire.codec.decode import read_header
from deltawire.codec.digest import digest_full
from deltawire.codec.inspect import TensorChanges, inspect_delta
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import RunManifest
from deltawire.protocol.errors import DigestMismatch, JobError, ObjectMissing, VersionGap
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import LATEST_KEY, RUN_KEY, ObjectKind
from deltawire.store.base import Store
from deltawire.sync.export import weights_at
from deltawire.sync.follower import Follower
from deltawire.sync.heads import parse_manifest


def only_run(store: Store) -> str:
    """The run id of a store that holds one run. ObjectMissing for none, JobError for several."""
    keys = [info.key for info in store.list()]
    runs = [key.removesuffix(LATEST_KEY).rstrip("/") for key in keys if _names_head(key)]
    if not runs:
        raise ObjectMissing(f"no {LATEST_KEY} in {store.uri}: no run was published there")
    if len(runs) > 1:
        raise JobError(f"{store.uri} holds several runs; name one with --run-id: {', '.join(runs)}")
    return runs[0]


def _names_head(key: str) -> bool:
    return key == LATEST_KEY or (key.endswith(f"/{LATEST_KEY}") and key.count("/") == 1)


def manifest_of(path: Path, given: Path | None) -> RunManifest:
    """run.json of a lone file: the one given, or the one above its folder in a bucket."""
    found = given if given is not None else path.resolve().parent.parent / RUN_KEY
    if not found.is_file():
        raise JobError(
            f"{path.name} alone does not say which tensors the run has: give its {RUN_KEY} with "
            "--manifest"
        )
    body = found.read_bytes()
    run_id = RunManifest.model_validate_json(body).run_id
    return parse_manifest(body, run_id=run_id)


def layout_of(path: Path, given: Path | None) -> Layout:
    """The tensors of a lone file's run."""
    return Layout(manifest_of(path, given).tensors)


def inspect_lone(path: Path, manifest: Path | None) -> tuple[ObjectHeader, list[TensorChanges]]:
    """A lone file's header, and per tensor what it changes (nothing for an anchor)."""
    header = read_header(path)
    if not header.sparse and not header.is_adapter:
        return header, []
    return header, inspect_delta(path, layout_of(path, manifest))


def inspect_version(
    follower: Follower, version: int | None
) -> tuple[ObjectHeader, list[TensorChanges]]:
    """The delta (or whole adapter) that leads to a version of a run, decoded on its base."""
    head = follower.head()
    wanted = head.version if version is None else version
    kinds = (ObjectKind.DELTA, ObjectKind.ADAPTER)
    deltas = [link for link in head.links if link.version == wanted and link.kind in kinds][-1:]
    if not deltas:
        raise VersionGap(have=wanted - 1, want=wanted)
    base, _ = weights_at(follower, wanted - 1)
    ((_, path),) = follower.fetch(deltas)
    return read_header(path), inspect_delta(path, follower.layout(), base)


def check_lone(path: Path, manifest: Path | None) -> str:
    """A sentence on a lone file that holds. Raises WeightsError children when it does not."""
    container = Container(path)
    header = read_header(path)
    layout = layout_of(path, manifest)
    if header.sparse or header.is_adapter:
        inspect_delta(path, layout)
        return f"{path.name}: sound as a file; what it leads to shows only on its base"
    found = str(digest_full(iter_anchor(path, layout), layout))
    if header.new_digest and found != header.new_digest:
        raise DigestMismatch(path.name, expected=header.new_digest, actual=found)
    return f"{path.name}: sound, {len(container.entries)} arrays, digest {found}"
