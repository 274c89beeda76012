"""Replay a route onto tensors: each object checked against its link and its digests, then written.

Guarantees: when an object is refused, the tensors stand exactly at the version before it. For
engines that must not write while tokens flow, the pieces are in codec; this is the plain way, for
a resuming trainer, for anyone's own loop and for tools.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from deltawire.codec.anchor import iter_anchor
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.bits import torch_type
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.digest import Digest, check_digests, digest_full
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import DigestMismatch, MalformedObject, VersionGap
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind


def replay(
    objects: Sequence[tuple[Link, Path]],
    tensors: LiveTensors,
    *,
    run_id: str,
    digest: Digest | None = None,
) -> Digest:
    """Write the objects in order; returns the digest of what the tensors then hold.

    `digest` is the running digest of the tensors as given; None when they hold nothing yet, and
    the route must then begin with an anchor. Raises WeightsError children.
    """
    for link, paths in by_link(objects):
        headers = [read_header(path) for path in paths]
        for header in headers:
            check_header(header, link, run_id=run_id, layout=tensors.layout, name=link.key)
        if link.kind is ObjectKind.ANCHOR:
            digest = _replay_anchor(link, paths, tensors)
        elif digest is None:
            raise VersionGap(have=None, want=link.version)
        else:
            digest = _replay_delta(headers[0], link, paths, tensors, held=digest)
    if digest is None:
        raise MalformedObject("an empty route leads nowhere from nothing")
    return digest


def by_link(objects: Sequence[tuple[Link, Path]]) -> Iterator[tuple[Link, list[Path]]]:
    """The route's objects, each with its files: one, or the shards of a sharded anchor."""
    for _, pairs in groupby(objects, key=lambda pair: pair[0].key):
        found = list(pairs)
        yield found[0][0], [path for _, path in found]


def check_header(
    header: ObjectHeader, link: Link, *, run_id: str, layout: Layout, name: str
) -> None:
    """Raise MalformedObject unless a file is the one its link speaks of, in this run."""
    said = {
        "run_id": (run_id, header.run_id),
        "model_version": (link.version, header.model_version),
        "base_version": (link.base_version, header.base_version),
        "new_digest": (link.new_digest, header.new_digest),
        "encoding": (link.encoding, header.encoding),
        "layout_digest": (layout.digest, header.layout_digest),
    }
    for field, (expected, found) in said.items():
        if expected != found:
            raise MalformedObject(f"{name}: {field} is {found!r}, {link.key} says {expected!r}")


def empty_tensors(layout: Layout) -> LiveTensors:
    """Zeroed CPU tensors of a run's layout, to replay onto."""
    zeros = {
        name: torch.zeros(tensor.shape, dtype=torch_type(tensor.dtype))
        for name, tensor in layout.items()
    }
    return LiveTensors(zeros.items(), layout)


def _replay_anchor(link: Link, paths: list[Path], tensors: LiveTensors) -> Digest:
    """Two passes over the files: the digest must hold before the first tensor is written."""
    layout = tensors.layout
    found = digest_full(iter_anchor(paths, layout=layout), layout)
    if str(found) != link.new_digest:
        raise DigestMismatch(link.key, expected=link.new_digest, actual=str(found))
    for name, bits in iter_anchor(paths, layout=layout):
        tensors.write(name, bits)
    return found


def _replay_delta(
    header: ObjectHeader, link: Link, paths: list[Path], tensors: LiveTensors, *, held: Digest
) -> Digest:
    if len(paths) != 1:
        raise MalformedObject(f"{link.key}: a delta is one file, {len(paths)} were given")
    if header.base_digest != str(held) and not header.is_adapter:
        raise DigestMismatch(link.key, expected=header.base_digest, actual=str(held))
    patches = decode_delta(paths[0], layout=tensors.layout, old=tensors)
    new = check_digests(header, patches, tensors.layout, held=held, name=link.key)
    scatter(tensors, patches)
    return new
