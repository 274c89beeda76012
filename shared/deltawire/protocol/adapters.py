"""LoRA runs: the base never changes, a version is an adapter.

The adapter's tensors stand in the run's layout after the base model's, under the keys that `peft`
gives them, so that digests, deltas and routes need to know nothing else of them.
LoRA: Hu et al. 2021, arXiv 2106.09685; rank-stabilised scaling: Kalajdzievski 2023, 2312.03732.
"""

import math
import re
from typing import Literal, NamedTuple

from pydantic import Field, JsonValue

from deltawire.protocol.wire_model import OpenWireModel

ADAPTER_ENCODING = "adapter"
"""Of a whole adapter: every tensor of it, plain, under PEFT's keys."""
ADAPTER_CONFIG_KEY = "adapter_config"
"""Metadata of such a file: PEFT's adapter_config.json as text."""
ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What `peft` looks for in a folder."""
_PREFIX = "base_model.model."
_PART = re.compile(re.escape(_PREFIX) + r"(?P<module>[A-Za-z0-9_.]+)\.lora_(?P<half>[AB])\.weight")


class AdapterManifest(OpenWireModel):
    """In run.json of a LoRA run: what a reader must know beside the tensors."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    rank_stabilised: bool = False
    targets: list[str]
    """Last parts of the names of the layers that have an adapter, sorted."""
    base_model: str = ""
    """Hub id or a plain name, for people and for `peft`."""
    base_digest: str = ""
    """What the base model's tensors add to the digest of every version."""

    @property
    def scale(self) -> float:
        """output = W x + scale * B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def peft_config(self) -> dict[str, JsonValue]:
        """adapter_config.json as `peft` writes it for such an adapter."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model or None,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "use_rslora": self.rank_stabilised,
            "target_modules": list[JsonValue](self.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
        }


class AdapterPart(NamedTuple):
    """Which half of which layer's adapter a tensor is."""

    module: str
    """``model.layers.0.self_attn.q_proj``"""
    half: Literal["A", "B"]
    """A is [rank, inputs], B is [outputs, rank]."""


def adapter_part(name: str) -> AdapterPart | None:
    """What a tensor's name says; None when it is not an adapter's."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return AdapterPart(module=match["module"], half="A" if match["half"] == "A" else "B")


def adapter_key(module: str, half: Literal["A", "B"]) -> str:
    """The inverse of ``adapter_part``."""
    return f"{_PREFIX}{module}.lora_{half}.weight"


def adapter_name(version: int) -> str:
    """What a version of the adapter is called where it is served: ``policy-v7``."""
    return f"policy-v{version}"
