"""Patches to one delta file: the front door of every encoding.

``encode_delta(patches, header, path, layout=layout)`` fills the header's counts, names and
encoding, writes the file and says what it did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltawire.codec.container import aligned, write_container
from deltawire.codec.patch import Layout, OldValues, SparsePatch, check_patches
from deltawire.codec.seed import seed_sections
from deltawire.protocol.errors import UnknownSchema
from deltawire.protocol.header import ObjectHeader

Encoding = Literal["auto", "seed", "compact", "classes"]
"""auto picks the smallest that both ends can afford; the others are written as asked."""


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
) -> EncodeReport:
    """Write one delta file. Patches in layout order, as ``Shadow.diff`` gives them.

    `header` brings versions, run id and digests. Relative encodings need patches with `old`;
    `classes` also needs `base`: the weights under the delta (``shadow.before(patches)``).
    Raises LayoutMismatch or MalformedObject when the patches do not fit the layout.
    """
    check_patches(patches, layout, name=path.name)
    if encoding not in ("auto", "seed"):
        raise UnknownSchema(f"unknown encoding {encoding!r}")
    full = header.model_copy(
        update={
            "sparse": True,
            "encoding": "seed",
            "num_changed": sum(patch.changed for patch in patches),
            "total_elements": layout.total_elements,
            "changed_params": [patch.name for patch in patches],
            "layout_digest": layout.digest,
        }
    )
    size = write_container(path, aligned(seed_sections(patches, layout)), full.to_metadata())
    return EncodeReport(header=full, encoding="seed", bytes=size, anchor_bytes=layout.nbytes)
