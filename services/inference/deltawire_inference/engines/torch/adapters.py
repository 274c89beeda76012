"""LoRA adapters beside the base weights: added to the outputs of linear layers, row by row.

Rows of one forward pass may each ask for another adapter or none. A name stands for one set of
weights for ever, so that a cached prefix and a recorded rollout cannot mean something else later.
LoRA: Hu et al. 2021, arXiv 2106.09685; files as `peft` writes them.
"""

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from deltawire.protocol.errors import EngineError, MalformedMessage, MalformedObject

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_KEY = "adapter_config"
"""Metadata of a single-file adapter: PEFT's configuration as JSON."""
_PART = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_PLAIN = {"use_dora": False, "bias": "none", "modules_to_save": None, "alpha_pattern": {}}
"""What of PEFT's options must have this value: the rest of LoRA's family is not served here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """One layer's part: output += scale * (x @ down.T) @ up.T."""

    down: torch.Tensor
    """[rank, inputs]"""
    up: torch.Tensor
    """[outputs, rank]"""
    scale: float

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """[tokens, inputs] -> [tokens, outputs], in the adapter's own precision."""
        low = inputs.to(self.down.dtype) @ self.down.T
        return (low @ self.up.T) * self.scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A loaded adapter: its parts by module name."""

    name: str
    sha256: str
    parts: dict[str, LowRank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Which tokens of a step's flat axis go through which adapter."""

    adapter: Adapter
    tokens: slice


class AdapterBank:
    """The adapters of one model; the newest `limit` can be asked for by name."""

    def __init__(self, module: nn.Module, *, limit: int) -> None:
        self._linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
        self._limit = limit
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._known: dict[str, str] = {}
        self._hooked: set[str] = set()
        self.uses: Sequence[Use] = ()
        """Of the step under way; read by the hooks."""

    def get(self, name: str) -> Adapter:
        """The adapter of that name. MalformedMessage when it is not loaded."""
        try:
            return self._adapters[name]
        except KeyError:
            loaded = ", ".join(self._adapters) or "none"
            raise MalformedMessage(f"adapter {name!r} is not loaded; loaded: {loaded}") from None

    def add(self, adapter: Adapter) -> None:
        """Make an adapter available. EngineError when its name means other weights already.

        Rows that run keep the adapter they began with, also when its name makes room.
        """
        if self._known.setdefault(adapter.name, adapter.sha256) != adapter.sha256:
            raise EngineError(
                f"adapter {adapter.name!r} is the name of other weights; load it under a new name"
            )
        for module_name in adapter.parts.keys() - self._hooked:
            self._hook(module_name)
        self._adapters[adapter.name] = adapter
        self._adapters.move_to_end(adapter.name)
        while len(self._adapters) > self._limit:
            self._adapters.popitem(last=False)

    def read(self, name: str, path: Path) -> Adapter:
        """Load and check a PEFT folder, or one file with its configuration in the metadata.

        Raises MalformedObject when it is no LoRA adapter for this model.
        """
        weights_path = path / _WEIGHTS if path.is_dir() else path
        try:
            with safe_open(str(weights_path), framework="pt") as file:
                said = (file.metadata() or {}).get(_CONFIG_KEY, "null")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            text = (path / _CONFIG).read_text() if path.is_dir() else said
            config = json.loads(text)
        except (OSError, SafetensorError, ValueError) as error:
            raise MalformedObject(f"{path.name}: not an adapter: {error}") from error
        parts = self._parts(tensors, _checked(config, name=path.name), name=path.name)
        sha256 = hashlib.sha256(weights_path.read_bytes() + text.encode()).hexdigest()
        return Adapter(name=name, sha256=sha256, parts=parts)

    def _parts(
        self, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, name: str
    ) -> dict[str, LowRank]:
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            match = _PART.fullmatch(key)
            if match is None or match["module"] not in self._linears:
                raise MalformedObject(f"{name}: {key} is no LoRA part of a linear layer here")
            halves.setdefault(match["module"], {})[match["half"]] = tensor
        return {
            module: _low_rank(
                halves[module], self._linears[module], config, name=f"{name}: {module}"
            )
            for module in halves
        }

    def _hook(self, module_name: str) -> None:
        def add_low_rank(
            module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
        ) -> torch.Tensor:
            for use in self.uses:
                part = use.adapter.parts.get(module_name)
                if part is not None:
                    place = output[0, use.tokens]
                    place.copy_(place + part.of(inputs[0][0, use.tokens]))
            return output

        self._linears[module_name].register_forward_hook(add_low_rank)
        self._hooked.add(module_name)


def _checked(config: Any, *, name: str) -> dict[str, Any]:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise MalformedObject(
            f"{name}: expected PEFT's LoRA configuration in {_CONFIG}, or under the metadata key "
            f"{_CONFIG_KEY!r} of a single file"
        )
    for option, plain in _PLAIN.items():
        if config.get(option, plain) not in (plain, None):
            raise MalformedObject(
                f"{name}: {option}={config[option]!r} is not served by the torch engine"
            )
    return config


def _low_rank(
    halves: dict[str, torch.Tensor], linear: nn.Linear, config: dict[str, Any], *, name: str
) -> LowRank:
    down, up = halves.get("A"), halves.get("B")
    if down is None or up is None or down.ndim != 2 or up.ndim != 2:
        raise MalformedObject(f"{name}: needs lora_A and lora_B, both matrices")
    rank = down.shape[0]
    expected = (rank, linear.in_features), (linear.out_features, rank)
    if (tuple(down.shape), tuple(up.shape)) != expected:
        raise MalformedObject(
            f"{name}: shapes {expected} expected, found {tuple(down.shape)}, {tuple(up.shape)}"
        )
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    device = linear.weight.device
    scale = float(config["lora_alpha"]) / divisor
    return LowRank(down=down.float().to(device), up=up.float().to(device), scale=scale)
