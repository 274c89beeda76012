"""The weights of a live model under their checkpoint names, whatever the model is wrapped in."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel

from deltawire.protocol.errors import InvalidKey
from deltawire.protocol.layout import model_file_key

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Name parts that torch.compile, FSDP and activation checkpointing add."""


@runtime_checkable
class SavesFiles(Protocol):
    """A configuration or tokenizer of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""
        ...


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def named_weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor) of every parameter and persistent buffer, in the model's order.

    Tied names come too; sharded parameters stay sharded (DTensor). No data is copied.
    """
    state = unwrapped(model).state_dict(keep_vars=True)
    return [
        (_checkpoint_name(name), value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    ]


def _checkpoint_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@contextmanager
def model_files(model: torch.nn.Module, tokenizer: object = None) -> Iterator[dict[str, Path]]:
    """Configuration and tokenizer files of a transformers model, in a folder for the time being.

    None for other models; code and weights are left out.
    """
    inner = unwrapped(model)
    sources = [getattr(inner, "config", None), getattr(inner, "generation_config", None), tokenizer]
    with tempfile.TemporaryDirectory(prefix="deltawire-model-") as folder:
        for source in sources:
            if isinstance(source, SavesFiles):
                source.save_pretrained(folder)
        yield {path.name: path for path in sorted(Path(folder).iterdir()) if _is_model_file(path)}


def _is_model_file(path: Path) -> bool:
    try:
        model_file_key(path.name)
    except InvalidKey:
        return False
    return path.is_file()


def base_name(model: torch.nn.Module) -> str:
    """Where a transformers model was loaded from, for people; empty for others."""
    config = getattr(unwrapped(model), "config", None)
    return str(getattr(config, "_name_or_path", "") or "")
