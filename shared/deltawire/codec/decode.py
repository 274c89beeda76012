"""One delta file to patches: checked before anything is handed out.

Everything that can be wrong with a file from outside is a MalformedObject, LayoutMismatch or
UnknownSchema that names the file. What the bytes *say* is right only when ``check_digests`` (see
digest.py) holds as well; nothing may touch live weights before.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deltawire.codec.adapter import read_adapter
from deltawire.codec.compact import read_compact
from deltawire.codec.container import Container
from deltawire.codec.foreign import V1_ENCODINGS, foreign_header, is_foreign, read_v1
from deltawire.codec.patch import Layout, OldValues, SparsePatch, check_patches
from deltawire.codec.seed import read_seed
from deltawire.protocol.errors import LayoutMismatch, UnknownSchema
from deltawire.protocol.header import ObjectHeader


def read_header(path: Path) -> ObjectHeader:
    """What a delta or anchor file says of itself, without reading its arrays.

    Reads our files and those of TRL's v0 and v1 (foreign.py), which leave digests empty.
    """
    return _header(Container(path))


def decode_delta(
    path: Path, layout: Layout, old: OldValues | None = None, *, threads: int = 1
) -> list[SparsePatch]:
    """The patches of a delta file, or of a whole adapter, absolute and in layout order.

    With `old` (the weights under the delta) every patch carries its old values, ready for
    ``check_digests`` and for undo. Relative encodings cannot be read without it (LayoutMismatch).
    """
    container = Container(path)
    header = _header(container)
    _check_header(header, layout, foreign=is_foreign(container.metadata), name=container.name)
    if header.is_adapter:
        return read_adapter(container, layout, old)
    if header.encoding == "seed":
        patches = read_seed(container, header, layout)
        check_patches(patches, layout, name=container.name)
    elif header.encoding in ("compact", "classes"):
        by_class = header.encoding == "classes"
        patches = read_compact(container, layout, old=old, classes=by_class, threads=threads)
    elif header.encoding in V1_ENCODINGS:
        patches = read_v1(container, header, layout)
        check_patches(patches, layout, name=container.name)
    else:
        raise UnknownSchema(f"{container.name}: unknown encoding {header.encoding!r}")
    _check_counts(header, patches, container)
    if old is None:
        return patches
    return [
        patch
        if patch.old is not None
        else replace(patch, old=old.gather(patch.name, patch.indices))
        for patch in patches
    ]


def _header(container: Container) -> ObjectHeader:
    if is_foreign(container.metadata):
        return foreign_header(container.metadata, name=container.name)
    return ObjectHeader.from_metadata(container.metadata, name=container.name)


def _check_header(header: ObjectHeader, layout: Layout, *, foreign: bool, name: str) -> None:
    if not header.sparse and not header.is_adapter:
        raise LayoutMismatch(f"{name}: an anchor, where a delta was expected")
    if foreign:
        return
    if header.layout_digest != layout.digest or header.total_elements != layout.total_elements:
        raise LayoutMismatch(
            f"{name}: written for layout {header.layout_digest[:16]}, "
            f"this run has {layout.digest[:16]}"
        )


def _check_counts(
    header: ObjectHeader, patches: Sequence[SparsePatch], container: Container
) -> None:
    found = sum(patch.changed for patch in patches)
    if header.num_changed != found:
        raise container.wrong(f"{header.num_changed} changes announced, {found} found")
