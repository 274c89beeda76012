"""What changed in one tensor, and the layout that gives names their shapes and places.

A ``SparsePatch`` is absolute: positions and the new bit patterns there. Applying it twice does no
harm. ``old`` holds the patterns it replaces: the undo log, the digest's input, and what relative
encodings need.
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from deltawire.codec.bits import BitArray, IndexArray, bits_type, word_of
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch, MalformedObject


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePatch:
    """One tensor's part of a delta.

    Example: elements 3 and 8 of a bf16 tensor become 1.0 and -0.0::

        SparsePatch(
            name="model.norm.weight",
            indices=np.array([3, 8], np.int32),            # [m] flat, sorted, unique
            values=np.array([0x3F80, 0x8000], np.uint16),  # [m] new bit patterns
            old=np.array([0x3F7F, 0x0000], np.uint16),     # [m] patterns replaced, or None
        )
    """

    name: str
    indices: IndexArray
    values: BitArray
    old: BitArray | None = None

    def __post_init__(self) -> None:
        if self.indices.ndim != 1 or self.indices.shape != self.values.shape:
            raise MalformedObject(
                f"{self.name}: {self.indices.shape} indices for {self.values.shape} values"
            )
        if self.old is not None and self.old.shape != self.values.shape:
            raise MalformedObject(
                f"{self.name}: {self.old.shape} old values for {self.values.shape} new ones"
            )

    @property
    def changed(self) -> int:
        """How many elements it changes."""
        return self.indices.size


class OldValues(Protocol):
    """Who can say what the weights hold now: live tensors, a shadow, an engine's index map."""

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        """The bit patterns at these flat positions. Positions are already checked."""
        ...

    def read(self, name: str, begin: int, end: int) -> BitArray:
        """The bit patterns of elements [begin, end). May be a view: do not write into it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """One tensor of the run and where its elements stand in the run's element order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Elements of all tensors before it."""
    numel: int = field(init=False)
    """Elements; 1 for a scalar."""
    bits: np.dtype[Any] = field(init=False)
    """The unsigned integer type of its elements."""
    index_type: np.dtype[Any] = field(init=False)
    """int32 where it can address every element, else int64."""

    def __post_init__(self) -> None:
        # Kept, not computed: the diff asks for them for each tensor while training waits.
        object.__setattr__(self, "numel", math.prod(self.shape))
        object.__setattr__(self, "bits", bits_type(self.dtype))
        index = np.dtype("<i4") if self.numel <= 2**31 else np.dtype("<i8")
        object.__setattr__(self, "index_type", index)

    @property
    def nbytes(self) -> int:
        """Size of the dense tensor."""
        return self.numel * int(self.bits.itemsize)


class Layout(Mapping[str, TensorLayout]):
    """Every stored tensor of a run, in order. Tied names are not in it: their data is stored once.

    Iterates over names in layout order; ``layout[name]`` raises LayoutMismatch when unknown.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._tensors: dict[str, TensorLayout] = {}
        offset = 0
        for spec in specs:
            if spec.name in self._tensors:
                raise LayoutMismatch(f"{spec.name} stands twice in the layout")
            if any(side < 0 for side in spec.shape):
                raise LayoutMismatch(f"{spec.name} has a negative side: {spec.shape}")
            tensor = TensorLayout(
                name=spec.name, shape=tuple(spec.shape), dtype=spec.dtype, offset=offset
            )
            self._tensors[spec.name] = tensor
            offset += tensor.numel
        self.total_elements = offset

    @classmethod
    def of_tensors(
        cls,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        master_dtype: str = "BF16",
    ) -> tuple["Layout", dict[str, str]]:
        """The layout of a live model, and its tied names (name -> name that holds its data).

        fp32 tensors are masters and are published as `master_dtype` ("F32" keeps them whole);
        all others are published as they are.
        """
        specs: list[TensorSpec] = []
        tied: dict[str, str] = {}
        seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
        for name, tensor in named_tensors:
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if tensor.numel() and place in seen:
                tied[name] = seen[place]
                continue
            seen[place] = name
            word = word_of(tensor.dtype)
            dtype = master_dtype if word == "F32" else word
            specs.append(TensorSpec(name=name, shape=list(tensor.shape), dtype=dtype))
        return cls(specs), tied

    @cached_property
    def specs(self) -> list[TensorSpec]:
        """As run.json lists them."""
        return [
            TensorSpec(name=t.name, shape=list(t.shape), dtype=t.dtype)
            for t in self._tensors.values()
        ]

    @cached_property
    def digest(self) -> str:
        """sha256 over the canonical JSON of ``[[name, shape, dtype], ...]`` in layout order."""
        rows = [[t.name, list(t.shape), t.dtype] for t in self._tensors.values()]
        body = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(body.encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Size of the dense weights."""
        return sum(t.nbytes for t in self._tensors.values())

    def between(self, begin: int, end: int) -> Iterator[tuple[TensorLayout, int, int]]:
        """The tensors that hold positions [begin, end) of the run, each with the first and the
        end of its own elements in there."""
        at = bisect_right(self._offsets, begin) - 1
        while at < len(self._ordered) and self._offsets[at] < end:
            tensor = self._ordered[at]
            first = max(begin - tensor.offset, 0)
            last = min(end - tensor.offset, tensor.numel)
            if first < last:
                yield tensor, first, last
            at += 1

    @cached_property
    def _ordered(self) -> list[TensorLayout]:
        return [t for t in self._tensors.values() if t.numel]

    @cached_property
    def _offsets(self) -> list[int]:
        return [t.offset for t in self._ordered]

    def __getitem__(self, name: str) -> TensorLayout:
        try:
            return self._tensors[name]
        except KeyError:
            raise LayoutMismatch(f"{name!r} is not a tensor of this run's layout") from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def check_patches(patches: Sequence[SparsePatch], layout: Layout, *, name: str) -> None:
    """Raise unless every patch fits the layout: known tensor once, in layout order, its dtype's
    bits, positions sorted, unique and in range. LayoutMismatch or MalformedObject, naming `name`.
    """
    last = -1
    for patch in patches:
        if patch.name not in layout:
            raise LayoutMismatch(f"{name}: {patch.name!r} is not a tensor of this run's layout")
        tensor = layout[patch.name]
        if tensor.offset < last:
            raise MalformedObject(f"{name}: {patch.name} stands twice or out of layout order")
        last = tensor.offset + tensor.numel
        if patch.values.dtype != tensor.bits:
            raise LayoutMismatch(
                f"{name}: {patch.name} is {tensor.dtype} here, found {patch.values.dtype} bits"
            )
        _check_positions(patch.indices, tensor, name=name)


def _check_positions(indices: IndexArray, tensor: TensorLayout, *, name: str) -> None:
    if indices.size == 0:
        return
    if int(indices[0]) < 0 or int(indices[-1]) >= tensor.numel:
        raise MalformedObject(
            f"{name}: {tensor.name} has {tensor.numel} elements, "
            f"found indices from {indices[0]} to {indices[-1]}"
        )
    if not bool(np.all(indices[1:] > indices[:-1])):
        raise MalformedObject(f"{name}: indices of {tensor.name} are not sorted and unique")
