"""The adapter of a LoRA run: what is served is the base with it, for every token.

Its tensors are live weights like the base's: staged, verified and swapped between two forward
passes with them. The product is added in the forward as `peft` does, operation by operation, so
that behaviour logprobs are the trainer's. (adapters.py holds adapters that single requests name.)
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.functional import linear

from deltawire.codec.adapter import adapter_layout
from deltawire.codec.bits import torch_type
from deltawire.codec.patch import Layout
from deltawire.protocol.adapters import AdapterManifest, adapter_key, adapter_part
from deltawire.protocol.errors import LayoutMismatch

_Hook = Callable[[nn.Module, tuple[torch.Tensor], torch.Tensor], torch.Tensor]


class PolicyAdapter:
    """Tensors under PEFT's keys, hooked to their layers; filled by the chain like all weights."""

    def __init__(
        self, module: nn.Module, layout: Layout, adapter: AdapterManifest, *, device: torch.device
    ) -> None:
        """Raises LayoutMismatch for a layer that this model does not have as a linear one."""
        self._tensors = {
            name: torch.zeros(spec.shape, dtype=torch_type(spec.dtype), device=device)
            for name, spec in adapter_layout(layout).items()
        }
        linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
        for name in self._tensors:
            part = adapter_part(name)
            if part is None or part.module not in linears:
                raise LayoutMismatch(f"{name}: the run's model has no such linear layer")
            if part.half == "A":
                up = self._tensors[adapter_key(part.module, "B")]
                hook = _low_rank(self._tensors[name], up, adapter.scale)
                linears[part.module].register_forward_hook(hook)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The live tensors."""
        return iter(self._tensors.items())


def _low_rank(down: torch.Tensor, up: torch.Tensor, scale: float) -> _Hook:
    def add(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        added = linear(linear(inputs[0].to(down.dtype), down), up) * scale
        return (output + added).to(output.dtype)

    return add
