"""Patches to one delta file: the front door of every encoding.

``encode_delta(patches, header, path, layout=layout)`` fills the header's counts, names and
encoding, writes the file and says what it did.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from deltawire.codec.compact import compact_sections
from deltawire.codec.container import Section, aligned, header_bytes, write_container
from deltawire.codec.foreign import V1_ENCODINGS, v1_metadata, v1_sections
from deltawire.codec.patch import Layout, OldValues, SparsePatch, check_patches
from deltawire.codec.seed import seed_sections
from deltawire.protocol.errors import LayoutMismatch, UnknownSchema
from deltawire.protocol.header import ObjectHeader

Encoding = Literal["auto", "seed", "compact", "absolute", "classes", "raw", "gap_delta"]
"""auto: compact, or classes where the link is slow. absolute is compact with whole values, for a
receiver that cannot give old ones. Any of these gives way to seed where seed is smaller. raw and
gap_delta are TRL's v1 (foreign.py): they carry no digests, so our followers refuse them."""

CLASSES_SAVE = 0.25
"""Share of a compact file that classes saves, as measured (bench/results/codec.json)."""
WALK_ELEMENTS_PER_S = 4e8
"""Base weights that one thread walks for classes, either end; low, as replicas are busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeReport:
    """What was written."""

    header: ObjectHeader
    """As it stands in the file."""
    encoding: str
    bytes: int
    anchor_bytes: int
    """Size of the dense weights."""

    @property
    def larger_than_anchor(self) -> bool:
        """True: publish an anchor instead; the delta is no use."""
        return self.bytes >= self.anchor_bytes


def encode_delta(
    patches: Sequence[SparsePatch],
    header: ObjectHeader,
    path: Path,
    *,
    layout: Layout,
    encoding: Encoding = "auto",
    base: OldValues | None = None,
    link_bytes_per_s: float | None = None,
    threads: int = 1,
) -> EncodeReport:
    """Write one delta file. Patches in layout order, as ``Shadow.diff`` gives them.

    `header` brings versions, run id and digests. Relative encodings need patches with `old`;
    `classes` also needs `base`: the weights under the delta (``shadow.before(patches)``).
    `link_bytes_per_s` is the slower of the upload and a replica's download, for ``auto``.
    Raises LayoutMismatch or MalformedObject when the patches do not fit the layout.
    """
    check_patches(patches, layout, name=path.name)
    full = header.model_copy(
        update={
            "sparse": True,
            "num_changed": sum(patch.changed for patch in patches),
            "total_elements": layout.total_elements,
            "layout_digest": layout.digest,
        }
    )
    if encoding in V1_ENCODINGS:
        return _write_v1(patches, full, path, layout, encoding)
    if encoding == "auto":
        slow = worth_classes(full, layout, link_bytes_per_s)
        encoding = "classes" if base is not None and slow else "compact"
    options = (
        [] if encoding == "seed" else [_relative(patches, full, layout, encoding, base, threads)]
    )
    if encoding == "seed" or all(tensor.index_type.itemsize == 4 for tensor in layout.values()):
        options.append(_seed(patches, full, layout))
    best = min(options, key=lambda option: option.nbytes)
    size = write_container(path, best.sections, best.header.to_metadata())
    return EncodeReport(
        header=best.header,
        encoding=best.header.encoding,
        bytes=size,
        anchor_bytes=layout.nbytes,
    )


def _write_v1(
    patches: Sequence[SparsePatch], header: ObjectHeader, path: Path, layout: Layout, encoding: str
) -> EncodeReport:
    full = header.model_copy(update={"encoding": encoding})
    metadata = v1_metadata(full, changed_names=len(patches))
    size = write_container(path, aligned(v1_sections(patches, layout, encoding)), metadata)
    return EncodeReport(header=full, encoding=encoding, bytes=size, anchor_bytes=layout.nbytes)


def worth_classes(header: ObjectHeader, layout: Layout, link_bytes_per_s: float | None) -> bool:
    """Whether a link is so slow that the bytes saved pay for walking the base."""
    if link_bytes_per_s is None:
        return False
    compact_bytes = 1.5 * header.num_changed  # about 11 bits a change
    saved_s = CLASSES_SAVE * compact_bytes / link_bytes_per_s
    return saved_s > 2 * layout.total_elements / WALK_ELEMENTS_PER_S


@dataclass(frozen=True, slots=True)
class _Option:
    """A file that could be written."""

    sections: list[Section]
    header: ObjectHeader

    @property
    def nbytes(self) -> int:
        head = len(header_bytes(self.sections, self.header.to_metadata()))
        return head + sum(section.nbytes for section in self.sections)


def _seed(patches: Sequence[SparsePatch], header: ObjectHeader, layout: Layout) -> _Option:
    names = [patch.name for patch in patches]
    full = header.model_copy(update={"encoding": "seed", "changed_params": names})
    return _Option(aligned(seed_sections(patches, layout)), full)


def _relative(
    patches: Sequence[SparsePatch],
    header: ObjectHeader,
    layout: Layout,
    encoding: Encoding,
    base: OldValues | None,
    threads: int,
) -> _Option:
    if encoding not in ("compact", "absolute", "classes"):
        known = ", ".join(get_args(Encoding))
        raise UnknownSchema(f"unknown encoding {encoding!r}; known are {known}")
    if encoding == "classes" and base is None:
        raise LayoutMismatch("the classes encoding needs the base weights")
    if encoding == "absolute":
        patches = [replace(patch, old=None) for patch in patches]
    sections = compact_sections(
        patches, layout, base=base if encoding == "classes" else None, threads=threads
    )
    written = "classes" if encoding == "classes" else "compact"
    full = header.model_copy(update={"encoding": written, "changed_params": []})
    return _Option(aligned(sections), full)
