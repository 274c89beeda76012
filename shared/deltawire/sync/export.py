"""A version out of the chain: a plain checkpoint folder, one merged file, another encoding.

Reads the store, writes local files. Everything on the way is verified against the chain.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from deltawire.codec.adapter import write_adapter
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.bits import BitArray, bits_of
from deltawire.codec.container import Section, aligned, write_container
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.digest import Digest, check_digests
from deltawire.codec.encode import EncodeReport, Encoding, encode_delta
from deltawire.codec.merge import merge_deltas
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, adapter_part
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import LayoutMismatch, VersionGap
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion
from deltawire.sync.adapters import merged
from deltawire.sync.follower import Follower
from deltawire.sync.replay import check_header, empty_tensors, replay

WEIGHTS_FILE = "model.safetensors"


def weights_at(follower: Follower, version: int) -> tuple[LiveTensors, Digest]:
    """The weights of a version, replayed from the nearest anchor. VersionGap when it is gone."""
    follower.head()
    tensors = empty_tensors(follower.layout())
    objects = follower.fetch(follower.route(None, version))
    return tensors, replay(objects, tensors, run_id=follower.run_id)


def export_checkpoint(follower: Follower, version: int, folder: Path) -> Digest:
    """A folder that transformers' `from_pretrained` opens: model files and model.safetensors.

    Of a LoRA run: the base with the adapter merged into it. Returns the digest of the version.
    """
    tensors, digest = weights_at(follower, version)
    folder.mkdir(parents=True, exist_ok=True)
    for path in follower.model_dir().iterdir():
        shutil.copyfile(path, folder / path.name)
    layout, adapter = tensors.layout, follower.manifest().adapter
    named: Iterable[tuple[str, BitArray]] = tensors.named_bits()
    if adapter is not None:
        whole = merged(dict(named), layout, adapter)
        named = ((name, bits_of(weight)) for name, weight in whole)
    sections = [
        Section(name=name, dtype=layout[name].dtype, shape=layout[name].shape, pieces=[bits])
        for name, bits in named
    ]
    part = folder / f".{WEIGHTS_FILE}.part"
    write_container(part, aligned(sections), {"format": "pt"})
    part.replace(folder / WEIGHTS_FILE)
    return digest


def export_adapter(follower: Follower, version: int, folder: Path) -> Digest:
    """A folder that `peft` opens on the run's base model. LayoutMismatch for a run without one."""
    adapter = follower.manifest().adapter
    if adapter is None:
        raise LayoutMismatch(f"run {follower.run_id!r} trains all weights: it has no adapter")
    tensors, digest = weights_at(follower, version)
    folder.mkdir(parents=True, exist_ok=True)
    layout = tensors.layout
    bits = ((name, held) for name, held in tensors.named_bits() if adapter_part(name) is not None)
    header = ObjectHeader(
        sparse=False,
        model_version=PolicyVersion(version),
        run_id=follower.run_id,
        new_digest=str(digest),
    )
    part = folder / f".{ADAPTER_WEIGHTS_FILE}.part"
    write_adapter(bits, header, part, layout=layout, adapter=adapter)
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(adapter.peft_config(), indent=2))
    part.replace(folder / ADAPTER_WEIGHTS_FILE)
    return digest


def merge_versions(
    follower: Follower, first: int, last: int, target: Path, *, encoding: Encoding = "compact"
) -> EncodeReport:
    """One file that leads from version `first` to version `last`. VersionGap when deltas miss."""
    tensors, base = weights_at(follower, first)
    layout = follower.layout()
    deltas, digest = [], base
    for link in _deltas(follower, first, last):
        patches, digest = _delta(follower, link, tensors, held=digest)
        deltas.append(patches)
        scatter(tensors, patches)
    header = ObjectHeader(
        sparse=True,
        model_version=PolicyVersion(last),
        base_version=PolicyVersion(first),
        run_id=follower.run_id,
        base_digest=str(base),
        new_digest=str(digest),
    )
    return encode_delta(
        merge_deltas(deltas, layout), header, target, layout=layout, encoding=encoding
    )


def convert_version(
    follower: Follower, version: int, target: Path, *, encoding: Encoding
) -> EncodeReport:
    """The delta that leads to `version`, in another encoding."""
    (link,) = _deltas(follower, version - 1, version)
    tensors, base = weights_at(follower, version - 1)
    patches, _ = _delta(follower, link, tensors, held=base)
    ((_, path),) = follower.fetch([link])
    return encode_delta(
        patches,
        read_header(path),
        target,
        layout=follower.layout(),
        encoding=encoding,
        base=tensors,
    )


def convert_file(path: Path, layout: Layout, target: Path, *, encoding: Encoding) -> EncodeReport:
    """A lone delta file in another encoding, without its base: what is relative stays unreadable
    (LayoutMismatch), and what is written is self-contained."""
    patches = decode_delta(path, layout)
    return encode_delta(patches, read_header(path), target, layout=layout, encoding=encoding)


def _deltas(follower: Follower, first: int, last: int) -> list[Link]:
    """The deltas from one version to another, one by one."""
    links = {
        link.base_version: link
        for link in follower.head().links
        if link.kind is ObjectKind.DELTA and link.version == (link.base_version or 0) + 1
    }
    try:
        return [links[PolicyVersion(base)] for base in range(first, last)]
    except KeyError as error:
        raise VersionGap(have=first, want=last) from error


def _delta(
    follower: Follower, link: Link, tensors: LiveTensors, *, held: Digest
) -> tuple[Sequence[SparsePatch], Digest]:
    ((_, path),) = follower.fetch([link])
    layout, header = tensors.layout, read_header(path)
    check_header(header, link, run_id=follower.run_id, layout=layout, name=link.key)
    patches = decode_delta(path, layout, tensors)
    return patches, check_digests(header, patches, layout, held=held, name=link.key)
