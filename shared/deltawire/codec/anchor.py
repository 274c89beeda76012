"""Anchors: every stored tensor of one version, in one file or in shards.

``plain`` is an ordinary safetensors checkpoint: name -> full tensor, in the published dtype.
``packed`` halves what can be halved, losslessly: the exponents of a 16-bit float tensor take about
2.7 bits of their eight. Each pattern is rotated left by one, so that the exponent fills the upper
byte (the sign goes down to the mantissa, which nothing compresses): ``{name}.top`` U8 is the upper
bytes in one zstd frame, ``{name}.rest`` U8 the lower ones. Tensors that gain nothing stay plain.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray
from deltawire.codec.container import Container, Section, aligned, write_container
from deltawire.codec.parallel import mapped
from deltawire.codec.patch import Layout, TensorLayout
from deltawire.codec.positions import squeeze, unsqueeze
from deltawire.protocol.errors import LayoutMismatch
from deltawire.protocol.header import ObjectHeader

_PACKED_DTYPES = ("BF16", "F16")
_PACKED_ELEMENTS = 4096
"""A smaller tensor is not worth two more header entries."""
_WORTH = 0.95
"""Packed only when it takes less than this share of the plain tensor."""


def write_anchor(
    named_bits: Iterable[tuple[str, BitArray]],
    header: ObjectHeader,
    path: Path,
    *,
    layout: Layout,
    packed: bool = False,
    threads: int = 1,
) -> int:
    """Write one file and return its size in bytes.

    Needs no second copy of the weights; packed, the compressed upper bytes (a sixth of it).
    Raises LayoutMismatch unless exactly the layout's tensors are given.
    """
    bits = dict(named_bits)
    _check_names(bits, layout)
    return _write(bits, list(layout), header, path, layout, packed, threads)


def write_anchor_shards(
    named_bits: Iterable[tuple[str, BitArray]],
    header: ObjectHeader,
    path_of: Callable[[int, int], Path],
    *,
    layout: Layout,
    max_shard_bytes: int,
    packed: bool = False,
    threads: int = 1,
) -> list[Path]:
    """Write an anchor as files of at most `max_shard_bytes` of dense tensors each (one tensor is
    never cut). ``path_of(1, 4)`` names the first of four. Returns the paths in order."""
    bits = dict(named_bits)
    _check_names(bits, layout)
    shards = shard_names(layout, max_shard_bytes)
    paths = [path_of(number, len(shards)) for number in range(1, len(shards) + 1)]
    for names, path in zip(shards, paths, strict=True):
        _write(bits, names, header, path, layout, packed, threads)
    return paths


def shard_names(layout: Layout, max_shard_bytes: int) -> list[list[str]]:
    """Names in layout order, cut before a shard would pass `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    size = 0
    for tensor in layout.values():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor.name)
        size += tensor.nbytes
    return shards


def iter_anchor(path: Path | Sequence[Path], layout: Layout) -> Iterator[tuple[str, BitArray]]:
    """(name, bits) of every tensor, in layout order within each shard.

    Names, shapes and dtypes are checked against the layout before the first tensor is given out;
    the bits are right when the digest is. Raises MalformedObject or LayoutMismatch.
    """
    containers = [Container(p) for p in ([path] if isinstance(path, Path) else path)]
    where: dict[str, Container] = {}
    for container in containers:
        for name in _names_in(container, layout):
            if name in where:
                raise container.wrong(f"{name} stands in {where[name].name} too")
            where[name] = container
    if where.keys() != set(layout):
        odd = sorted(set(layout) - where.keys())
        raise LayoutMismatch(f"{containers[0].name}: {len(odd)} tensors missing: {odd[:4]}")
    return ((name, _read(where[name], layout[name])) for name in layout)


def _check_names(bits: dict[str, BitArray], layout: Layout) -> None:
    if bits.keys() != set(layout):
        raise LayoutMismatch(f"an anchor holds all {len(layout)} tensors, {len(bits)} were given")
    clash = [name for name in layout if name.endswith((".top", ".rest")) and _stem(name) in layout]
    if clash:
        raise LayoutMismatch(f"{clash[0]} takes the name of a packed half; write plain anchors")


def _write(
    bits: dict[str, BitArray],
    names: list[str],
    header: ObjectHeader,
    path: Path,
    layout: Layout,
    packed: bool,
    threads: int,
) -> int:
    def sections_of(name: str) -> list[Section]:
        return _sections(layout[name], bits[name], packed=packed)

    sections = [s for found in mapped(sections_of, names, threads=threads) for s in found]
    elements = sum(layout[name].numel for name in names)
    full = header.model_copy(
        update={
            "sparse": False,
            "encoding": "packed" if packed else "plain",
            "num_changed": elements,
            "total_elements": layout.total_elements,
            "changed_params": [],
            "layout_digest": layout.digest,
        }
    )
    return write_container(path, aligned(sections), full.to_metadata())


def _sections(tensor: TensorLayout, bits: BitArray, *, packed: bool) -> list[Section]:
    plain = Section(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, pieces=[bits])
    if not packed or tensor.dtype not in _PACKED_DTYPES or bits.size < _PACKED_ELEMENTS:
        return [plain]
    top, rest = np.empty(bits.size, np.uint8), np.empty(bits.size, np.uint8)
    kernels.load().split_rotated(bits, top, rest)
    frame = squeeze(top)
    if len(frame) + bits.size > _WORTH * plain.nbytes:
        return [plain]
    return [
        Section(name=f"{tensor.name}.top", dtype="U8", shape=(len(frame),), pieces=[frame]),
        Section(name=f"{tensor.name}.rest", dtype="U8", shape=(bits.size,), pieces=[rest]),
    ]


def _names_in(container: Container, layout: Layout) -> list[str]:
    """The layout's tensors that a file holds, each checked. Nothing else may be in it."""
    names = []
    for entry_name, entry in container.entries.items():
        name = entry_name if entry_name in layout else _stem(entry_name)
        if name not in layout:
            raise LayoutMismatch(f"{container.name}: {entry_name!r} is not of this run's layout")
        tensor = layout[name]
        if entry_name == name:
            expected = (tensor.dtype, tensor.shape)
            names.append(name)
        elif entry_name.endswith(".rest"):
            expected = ("U8", (tensor.numel,))
            if f"{name}.top" not in container:
                raise container.wrong(f"{name}: half of a packed tensor")
        else:
            expected = ("U8", (entry.end - entry.begin,))
            names.append(name)
            if f"{name}.rest" not in container or tensor.dtype not in _PACKED_DTYPES:
                raise container.wrong(f"{name}: half of a packed tensor")
        if (entry.dtype, entry.shape) != expected:
            raise LayoutMismatch(
                f"{container.name}: {entry_name} should be {expected[0]} {expected[1]} in this "
                f"run, found {entry.dtype} {entry.shape}"
            )
    return names


def _stem(name: str) -> str:
    return name.removesuffix(".top").removesuffix(".rest")


def _read(container: Container, tensor: TensorLayout) -> BitArray:
    if tensor.name in container:
        return container.read(tensor.name)
    frame = container.read(f"{tensor.name}.top")
    rest = container.read(f"{tensor.name}.rest")
    size = tensor.numel
    top = unsqueeze(frame, least=size, most=size, name=container.name)
    bits = np.empty(size, tensor.bits)
    kernels.load().join_rotated(top, rest, bits)
    return bits
