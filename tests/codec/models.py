"""Small models with hostile contents, and updates to them, as hypothesis strategies."""

from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import strategies as st

from deltawire.codec.bits import TORCH_TYPES, BitArray, IndexArray, bits_type, tensor_of
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.versions import PolicyVersion

DTYPES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8", "F64"]
SHAPES: list[list[int]] = [[], [0], [1], [7], [3, 5], [2, 0, 4], [64], [257], [31, 33], [5, 7, 11]]
"""A scalar, empty ones, odd ones, and sizes around the 64-byte groups of the diff loop."""

specs = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=5
).map(
    lambda rows: [
        TensorSpec(name=f"layer.{i}.weight", shape=shape, dtype=dtype)
        for i, (shape, dtype) in enumerate(rows)
    ]
)
seeds = st.integers(0, 2**32 - 1)
densities = st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0])


def random_bits(layout: Layout, rng: np.random.Generator) -> dict[str, BitArray]:
    """Every bit pattern is equally likely: NaN payloads, infinities and -0.0 among them."""
    return {n: _patterns(rng, layout[n].numel, layout[n].dtype) for n in layout}


def mutate(
    bits: Mapping[str, BitArray], layout: Layout, density: float, rng: np.random.Generator
) -> dict[str, BitArray]:
    """Some elements replaced: by neighbours on the float line, flipped signs, or anything."""
    after = {}
    for name, before in bits.items():
        fresh = before.copy()
        hit = rng.random(before.size) < density
        way = rng.integers(0, 4, before.size)
        one = fresh.dtype.type(1)
        top = fresh.dtype.type(1 << (8 * fresh.itemsize - 1))
        anything = _patterns(rng, before.size, layout[name].dtype)
        options = [fresh + one, fresh - one, fresh ^ top, anything]
        fresh[hit] = np.choose(way, options)[hit]
        after[name] = fresh
    return after


def tensors_of(bits: Mapping[str, BitArray], layout: Layout) -> dict[str, torch.Tensor]:
    """Live tensors over copies of the bits."""
    return {n: tensor_of(bits[n].copy(), layout[n].dtype, layout[n].shape) for n in layout}


class LiveBits:
    """Old values straight from arrays."""

    def __init__(self, bits: Mapping[str, BitArray]) -> None:
        self._bits = bits

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        return self._bits[name][indices]

    def read(self, name: str, begin: int, end: int) -> BitArray:
        return self._bits[name][begin:end]


def header_of(version: int = 1, **fields: object) -> ObjectHeader:
    """A header as a publisher fills it."""
    return ObjectHeader.model_validate(
        {
            "sparse": True,
            "model_version": PolicyVersion(version),
            "base_version": PolicyVersion(version - 1) if version else None,
            "run_id": "run-1",
            **fields,
        }
    )


def difference(
    before: Mapping[str, BitArray], after: Mapping[str, BitArray], layout: Layout
) -> list[SparsePatch]:
    """The patches from `before` to `after`, by the plainest code there is."""
    patches = []
    for name in layout:
        indices = np.flatnonzero(before[name] != after[name]).astype(layout[name].index_type)
        if indices.size:
            patches.append(
                SparsePatch(
                    name=name,
                    indices=indices,
                    values=after[name][indices],
                    old=before[name][indices],
                )
            )
    return patches


def _patterns(rng: np.random.Generator, size: int, dtype: str) -> BitArray:
    bits = bits_type(dtype)
    return rng.integers(0, 2 ** (8 * bits.itemsize), size, dtype=bits)


assert set(DTYPES) <= set(TORCH_TYPES)
