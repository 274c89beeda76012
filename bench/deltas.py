"""The deltas that are measured: recorded steps, and synthetic models of any size and density."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from deltawire.codec.bits import BitArray, IndexArray
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.versions import PolicyVersion

Flat = npt.NDArray[np.uint16]


class FlatWeights:
    """All bf16 patterns of a model in one array, seen as its tensors. An OldValues."""

    def __init__(self, layout: Layout, flat: Flat) -> None:
        self.layout, self.flat = layout, flat

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        return self.read(name, 0, self.layout[name].numel)[indices]

    def read(self, name: str, begin: int, end: int) -> BitArray:
        offset = self.layout[name].offset
        return self.flat[offset + begin : offset + end]

    def named_bits(self) -> Iterator[tuple[str, BitArray]]:
        return ((name, self.read(name, 0, self.layout[name].numel)) for name in self.layout)

    def named_tensors(self, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
        """bf16 views, or fp32 copies that round back to the same bits."""
        found = []
        for name, bits in self.named_bits():
            tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            found.append((name, tensor.view(self.layout[name].shape).to(dtype)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One update: the weights under it, and what changed."""

    number: int
    base: FlatWeights
    indices: IndexArray
    """Positions in the run's element order."""
    values: BitArray
    old: BitArray

    @property
    def density(self) -> float:
        return self.indices.size / self.base.layout.total_elements

    def patches(self) -> list[SparsePatch]:
        found = []
        layout = self.base.layout
        ends = [tensor.offset + tensor.numel for tensor in layout.values()]
        cuts = [0, *np.searchsorted(self.indices, ends).tolist()]
        for tensor, low, high in zip(layout.values(), cuts[:-1], cuts[1:], strict=True):
            if high > low:
                found.append(
                    SparsePatch(
                        name=tensor.name,
                        indices=(self.indices[low:high] - tensor.offset).astype(np.int32),
                        values=self.values[low:high],
                        old=self.old[low:high],
                    )
                )
        return found

    def header(self) -> ObjectHeader:
        """As long as a real one."""
        return ObjectHeader(
            sparse=True,
            model_version=PolicyVersion(self.number),
            base_version=PolicyVersion(self.number - 1),
            run_id="bench-run-0001",
            base_digest="0" * 32,
            new_digest="f" * 32,
        )


def recorded_steps(folder: Path) -> Iterator[Step]:
    """Each step of a recording in turn. The base array is moved on when the next is asked for."""
    described = json.loads((folder / "layout.json").read_text())
    layout = Layout(
        TensorSpec(name=name, shape=shape, dtype="BF16")
        for name, shape in zip(described["names"], described["shapes"], strict=True)
    )
    weights = FlatWeights(layout, np.load(folder / "base.npy"))
    for path in sorted(folder.glob("step_*.npz")):
        with np.load(path) as arrays:
            indices, values = arrays["indices"], arrays["values"]
        old = weights.flat[indices]
        number = int(path.stem.removeprefix("step_"))
        yield Step(number=number, base=weights, indices=indices, values=values, old=old)
        weights.flat[indices] = values


def synthetic_step(elements: int, density: float) -> Step:
    """Normal weights in a Llama's shapes, cut off at `elements` to the nearest row of 2,048; each
    change one unit up or down."""
    block: list[tuple[int, ...]] = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)]
    block += [(8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)]
    shapes: list[tuple[int, ...]] = [(min(32000, elements // 2048), 2048)]
    while _elements(shapes) + _elements(block) <= elements:
        shapes += block
    shapes.append(((elements - _elements(shapes)) // 2048, 2048))
    layout = Layout(
        TensorSpec(name=f"layer.{k}.weight", shape=list(shape), dtype="BF16")
        for k, shape in enumerate(shapes)
    )
    rng = np.random.default_rng(0)
    flat = np.empty(layout.total_elements, np.uint16)
    piece = 1 << 24
    normal = torch.from_numpy(rng.standard_normal(piece, np.float32) * 0.03).to(torch.bfloat16)
    pattern = normal.view(torch.int16).numpy().view(np.uint16)
    for begin in range(0, flat.size, piece):
        part = flat[begin : begin + piece]
        part[:] = np.roll(pattern, begin // piece)[: part.size]
    changes = int(flat.size * density)
    indices = np.unique(rng.integers(0, flat.size, changes, dtype=np.int64))
    old = flat[indices]
    values = old + rng.choice(np.array([1, -1], np.int16), indices.size).view(np.uint16)
    base = FlatWeights(layout, flat)
    return Step(number=1, base=base, indices=indices, values=values, old=old)


def _elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)
