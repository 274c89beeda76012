"""Anchors: every stored tensor of one version.

``plain`` is an ordinary safetensors checkpoint: name -> full tensor, in the published dtype.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from deltawire.codec.bits import BitArray
from deltawire.codec.container import Container, Section, aligned, write_container
from deltawire.codec.patch import Layout
from deltawire.protocol.errors import LayoutMismatch
from deltawire.protocol.header import ObjectHeader


def write_anchor(
    named_bits: Iterable[tuple[str, BitArray]],
    header: ObjectHeader,
    path: Path,
    *,
    layout: Layout,
    packed: bool = False,
) -> int:
    """Write one file and return its size in bytes. Needs no second copy of the weights."""
    bits = dict(named_bits)
    if bits.keys() != set(layout):
        raise LayoutMismatch(f"an anchor holds all {len(layout)} tensors, {len(bits)} were given")
    sections = aligned(
        [
            Section(name=n, dtype=layout[n].dtype, shape=layout[n].shape, pieces=[bits[n]])
            for n in layout
        ]
    )
    full = header.model_copy(
        update={
            "sparse": False,
            "encoding": "plain",
            "num_changed": layout.total_elements,
            "total_elements": layout.total_elements,
            "changed_params": [],
            "layout_digest": layout.digest,
        }
    )
    return write_container(path, sections, full.to_metadata())


def iter_anchor(path: Path, layout: Layout) -> Iterator[tuple[str, BitArray]]:
    """(name, bits) of every tensor in layout order. Raises MalformedObject or LayoutMismatch
    before the first is given out."""
    container = Container(path)
    if container.entries.keys() != set(layout):
        odd = sorted(container.entries.keys() ^ set(layout))
        raise LayoutMismatch(f"{path.name}: tensors differ from the run's layout: {odd[:4]}")
    for name in layout:
        entry = container.entries[name]
        if (entry.dtype, entry.shape) != (layout[name].dtype, layout[name].shape):
            raise LayoutMismatch(
                f"{path.name}: {name} is {layout[name].dtype} {layout[name].shape} in this run, "
                f"found {entry.dtype} {entry.shape}"
            )
    return ((name, container.read(name)) for name in layout)
