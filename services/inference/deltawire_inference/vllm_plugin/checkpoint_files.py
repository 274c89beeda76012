"""Read a local safetensors checkpoint: headers alone, or one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from deltawire.protocol.errors import MalformedObject
from deltawire_inference.vllm_plugin.checkpoint_map import TensorSpec

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INDEX = "model.safetensors.index.json"


def weight_files(model_dir: Path) -> list[Path]:
    """The files a checkpoint's weights lie in: those of the index where there is one, else all.

    Raises:
        MalformedObject: No safetensors file there.
    """
    index = model_dir / _INDEX
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(model_dir / name for name in names)
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise MalformedObject(f"{model_dir}: expected a checkpoint, found no *.safetensors file")
    return files


def read_specs(model_dir: Path) -> list[TensorSpec]:
    """Name, shape and dtype of every tensor, from the headers.

    Raises:
        MalformedObject: A dtype that no map is made for.
    """
    specs = []
    for path in weight_files(model_dir):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise MalformedObject(f"{path}: {name} has unknown dtype {part.get_dtype()}")
                specs.append(TensorSpec(name=name, shape=tuple(part.get_shape()), dtype=dtype))
    return specs


def read_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, one at a time, so that no second model is held."""
    for path in weight_files(model_dir):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                yield name, file.get_tensor(name)
