"""The seed encoding: ``{name}.indices`` int32 and ``{name}.values`` in the tensor's own dtype.

The format of TRL's first delta branch (here "v0"), which anything written for it can read. Six
bytes a change for bf16, self-contained, and inspectable with ``safe_open``. int32 reaches 2^31
elements of one tensor; a larger tensor must be published in rows.
"""

from collections.abc import Sequence

import numpy as np

from deltawire.codec.container import Container, Section
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.errors import LayoutMismatch
from deltawire.protocol.header import ObjectHeader


def seed_sections(patches: Sequence[SparsePatch], layout: Layout) -> list[Section]:
    """The arrays of a seed file. Raises LayoutMismatch for a tensor beyond int32."""
    sections: list[Section] = []
    for patch in patches:
        tensor = layout[patch.name]
        if tensor.index_type.itemsize > 4:
            raise LayoutMismatch(
                f"{patch.name}: {tensor.numel} elements are beyond int32 indices; "
                "use the compact encoding or publish the tensor in rows"
            )
        shape = (patch.changed,)
        indices = patch.indices.astype(np.int32, copy=False)
        sections += [
            Section(name=f"{patch.name}.indices", dtype="I32", shape=shape, pieces=[indices]),
            Section(
                name=f"{patch.name}.values", dtype=tensor.dtype, shape=shape, pieces=[patch.values]
            ),
        ]
    return sections


def read_seed(container: Container, header: ObjectHeader, layout: Layout) -> list[SparsePatch]:
    """The patches of a seed file in layout order. Raises MalformedObject or LayoutMismatch.

    Names come from the header's ``changed_params``; an array that it does not name is an error.
    """
    expected = {f"{n}.{part}" for n in header.changed_params for part in ("indices", "values")}
    if expected != container.entries.keys():
        odd = sorted(expected ^ container.entries.keys())
        raise container.wrong(f"changed_params and arrays differ: {odd[:4]}")
    return [
        _read_patch(container, name, layout)
        for name in sorted(header.changed_params, key=lambda n: layout[n].offset)
    ]


def _read_patch(container: Container, name: str, layout: Layout) -> SparsePatch:
    indices = container.entries[f"{name}.indices"]
    values = container.entries[f"{name}.values"]
    if indices.dtype != "I32" or len(indices.shape) != 1 or indices.shape != values.shape:
        raise container.wrong(
            f"{name}: {indices.dtype} {indices.shape} indices for {values.shape} values"
        )
    if values.dtype != layout[name].dtype:
        raise LayoutMismatch(
            f"{container.name}: {name} is {layout[name].dtype} in this run, found {values.dtype}"
        )
    return SparsePatch(
        name=name,
        indices=container.read(f"{name}.indices").view(np.int32),
        values=container.read(f"{name}.values"),
    )
