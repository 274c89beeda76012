"""Files of the two delta formats that were proposed for TRL, both ways.

v0 (trl pull request 5417): ``{name}.indices`` int32 and ``{name}.values``; ``changed_params`` in
the metadata names them. Our seed encoding is v0 with more metadata, so a v0 reader opens it; here
v0 is read as it is. v1 (5937): ``{name}.idx`` and ``{name}.val``, found by the suffix ``.val``,
with ``format="sparse_weight_patch"``, ``version="1"`` and an ``encoding``:

* ``raw``: int32 positions;
* ``gap_delta``: position less the one before less one (the first counts from -1), in uint16 when
  every gap fits, else uint32; the array's dtype says which;
* ``nvcomp_cascaded``: needs NVIDIA's library; refused.

Neither says which version it is based on, nor which run it is of, nor what should come out: such a
delta is as trustworthy as where it came from, and ``check_digests`` cannot hold for it.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from deltawire.codec.bits import IndexArray
from deltawire.codec.container import Container, Section
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.codec.positions import gaps_of
from deltawire.protocol.errors import MalformedObject, UnknownSchema
from deltawire.protocol.header import HEADER_FORMAT, ObjectHeader
from deltawire.protocol.versions import PolicyVersion

V1_FORMAT = "sparse_weight_patch"
V1_ENCODINGS = ("raw", "gap_delta")


def is_foreign(metadata: Mapping[str, str]) -> bool:
    """Whether a file is not ours: it is v1, or v0, or something unknown."""
    return metadata.get("format") != HEADER_FORMAT


def foreign_header(metadata: Mapping[str, str], *, name: str) -> ObjectHeader:
    """What a v0 or v1 file says, as our header; what it does not say stays empty.

    ``encoding`` is seed for v0, raw or gap_delta for v1, plain for an anchor of either.
    Raises MalformedObject, or UnknownSchema for a format or encoding that is neither.
    """
    found = metadata.get("format")
    if found not in (None, V1_FORMAT) or (found and metadata.get("version") != "1"):
        raise UnknownSchema(f"{name}: unknown format {found!r} {metadata.get('version')!r}")
    try:
        sparse = {"True": True, "False": False}[metadata["sparse"]]
        names = json.loads(metadata.get("changed_params", "[]"))
        encoding = metadata.get("encoding", "seed") if found else "seed"
        header = ObjectHeader(
            sparse=sparse,
            model_version=PolicyVersion(int(metadata["model_version"])),
            encoding=encoding if sparse else "plain",
            num_changed=int(metadata.get("total_changed_elements", "0")),
            total_elements=int(metadata.get("total_elements", "0")),
            changed_params=names,
        )
    except (KeyError, ValueError, RecursionError) as error:
        raise MalformedObject(f"{name}: header field missing or wrong: {error!r}") from error
    if sparse and header.encoding not in ("seed", *V1_ENCODINGS):
        raise UnknownSchema(f"{name}: unknown encoding {header.encoding!r}")
    return header


def v1_sections(patches: Sequence[SparsePatch], layout: Layout, encoding: str) -> list[Section]:
    """The arrays of a v1 file. `encoding` is raw or gap_delta."""
    sections: list[Section] = []
    for patch in patches:
        shape = (patch.changed,)
        index, dtype = _v1_index(patch.indices, encoding)
        sections += [
            Section(name=f"{patch.name}.idx", dtype=dtype, shape=shape, pieces=[index]),
            Section(
                name=f"{patch.name}.val",
                dtype=layout[patch.name].dtype,
                shape=shape,
                pieces=[patch.values],
            ),
        ]
    return sections


def v1_metadata(header: ObjectHeader, *, changed_names: int) -> dict[str, str]:
    """The strings of a v1 file."""
    return {
        "format": V1_FORMAT,
        "version": "1",
        "sparse": "True",
        "model_version": str(header.model_version),
        "num_changed_params": str(changed_names),
        "total_changed_elements": str(header.num_changed),
        "total_elements": str(header.total_elements),
        "sparsity": repr(1.0 - header.density),
        "encoding": header.encoding,
    }


def read_v1(container: Container, header: ObjectHeader, layout: Layout) -> list[SparsePatch]:
    """The patches of a v1 file in layout order, empty ones left out. Raises MalformedObject."""
    names = [key.removesuffix(".val") for key in container.entries if key.endswith(".val")]
    known = {f"{name}.{part}" for name in names for part in ("idx", "val")}
    if known != container.entries.keys():
        odd = sorted(known ^ container.entries.keys())
        raise container.wrong(f"arrays without their other half: {odd[:4]}")
    patches = [
        _read_v1_patch(container, name, layout, header.encoding)
        for name in sorted(names, key=lambda n: layout[n].offset)
    ]
    return [patch for patch in patches if patch.changed]


def _read_v1_patch(container: Container, name: str, layout: Layout, encoding: str) -> SparsePatch:
    index, values = container.entries[f"{name}.idx"], container.entries[f"{name}.val"]
    tensor = layout[name]
    allowed = ("I32",) if encoding == "raw" else ("U16", "U32")
    if index.dtype not in allowed or len(index.shape) != 1 or index.shape != values.shape:
        raise container.wrong(
            f"{name}: {encoding} needs {' or '.join(allowed)} of the values' length, "
            f"found {index.dtype} {index.shape} for {values.shape}"
        )
    if values.dtype != tensor.dtype:
        raise container.wrong(f"{name}: {tensor.dtype} in this run, found {values.dtype}")
    stored = container.read(f"{name}.idx")
    positions = (
        stored.view(np.int32) if encoding == "raw" else np.cumsum(stored.astype(np.int64) + 1) - 1
    )
    if positions.size and not 0 <= int(positions[-1]) < tensor.numel:
        raise container.wrong(f"{name}: index {positions[-1]} of {tensor.numel} elements")
    return SparsePatch(
        name=name,
        indices=positions.astype(tensor.index_type),
        values=container.read(f"{name}.val"),
    )


def _v1_index(indices: IndexArray, encoding: str) -> tuple[IndexArray, str]:
    if encoding == "raw":
        return indices.astype(np.int32), "I32"
    gaps = gaps_of(indices.astype(np.int64))
    if gaps.size == 0 or int(gaps.max()) < 2**16:
        return gaps.astype(np.uint16), "U16"
    return gaps.astype(np.uint32), "U32"
