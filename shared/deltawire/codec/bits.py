"""Dtype words, and tensors seen as bit patterns.

Everything in this package compares, stores and moves *bits*: a float comparison calls NaN changed
at every step and takes -0.0 for +0.0. A tensor is therefore seen as a flat array of unsigned
integers of its element size. Dtypes are named by safetensors' words (BF16, F16, F32, F8_E4M3, ...).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltawire.protocol.errors import LayoutMismatch

BitArray = npt.NDArray[np.unsignedinteger[Any]]
"""Flat bit patterns: uint8, uint16, uint32 or uint64 by element size."""
IndexArray = npt.NDArray[np.signedinteger[Any]]
"""Flat element positions inside one tensor: int32, or int64 for a tensor above 2^31 elements."""

TORCH_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "U16": torch.uint16,
        "U32": torch.uint32,
        "U64": torch.uint64,
    }
)
_WORDS: Mapping[torch.dtype, str] = MappingProxyType({t: w for w, t in TORCH_TYPES.items()})
_UNSIGNED: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
)
_SIGNED: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)


def word_of(dtype: torch.dtype) -> str:
    """``word_of(torch.bfloat16) == "BF16"``. Raises LayoutMismatch for a dtype we do not carry."""
    if dtype not in _WORDS:
        raise LayoutMismatch(f"{dtype} cannot be published; known are {', '.join(TORCH_TYPES)}")
    return _WORDS[dtype]


def torch_type(word: str) -> torch.dtype:
    """``torch_type("BF16") == torch.bfloat16``. Raises LayoutMismatch for an unknown word."""
    if word not in TORCH_TYPES:
        raise LayoutMismatch(f"unknown dtype {word!r}; known are {', '.join(TORCH_TYPES)}")
    return TORCH_TYPES[word]


def bits_type(word: str) -> np.dtype[Any]:
    """The unsigned integer that holds one element: ``bits_type("BF16") == uint16``."""
    return _UNSIGNED[torch_type(word).itemsize]


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a flat *signed* integer view on its device (torch lacks unsigned
    arithmetic). Shares memory when the tensor is contiguous; a copy otherwise."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_SIGNED[flat.element_size()])


def bits_of(tensor: torch.Tensor) -> BitArray:
    """The tensor's elements as flat bit patterns. Shares memory with a contiguous CPU tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = flat_bits(tensor).cpu()
    size = tensor.element_size()
    signed: npt.NDArray[Any] = tensor.detach().view(_SIGNED[size]).numpy()
    return signed.reshape(-1).view(_UNSIGNED[size])


def tensor_of(bits: BitArray, word: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """The inverse of ``bits_of``: a tensor over the same memory (``bits`` must be writable)."""
    signed = torch.from_numpy(bits.view(f"<i{bits.itemsize}"))
    flat = signed.view(torch_type(word))
    return flat if shape is None else flat.view(shape)
