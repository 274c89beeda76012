"""Prove a map before it is trusted, and say what no map can reach.

A backend may change a layout after loading in a way that the loader does not show (fused experts
that are repacked in place keep their size). Comparing every mapped element with the checkpoint
that was loaded finds that. A map that fails is never used to write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deltawire.protocol.errors import ReplicaBroken
from deltawire_inference.vllm_plugin.checkpoint_map import CheckpointMap
from deltawire_inference.vllm_plugin.live import LiveModel, count_differences
from deltawire_inference.vllm_plugin.trace import storage_id

_MLA_COPIES = ("W_UK", "W_UK_T", "W_UV")
"""Where vLLM's MLA layers keep what they computed from `kv_b_proj`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What deserves a look: nothing here is wrong by itself."""

    unwritten: tuple[str, ...]
    """Parameters that no checkpoint tensor reaches."""
    derived: tuple[str, ...]
    """Tensors on modules that are neither parameter nor buffer: perhaps copies made at load time,
    which an update in place cannot refresh."""


def differences(
    live: LiveModel, where: CheckpointMap, tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, int]:
    """Checkpoint tensor -> number of live elements with other bits; empty when all are equal."""
    counts = ((name, count_differences(live, where, name, value)) for name, value in tensors)
    return {name: count for name, count in counts if count}


def require_equal(
    live: LiveModel, where: CheckpointMap, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Check a map against the checkpoint that the model was loaded from.

    Raises:
        ReplicaBroken: Some mapped element is not where the map says.
    """
    if found := differences(live, where, tensors):
        name, count = next(iter(found.items()))
        raise ReplicaBroken(
            f"the learned map does not hold: {name} differs from the checkpoint in {count} "
            f"elements ({len(found)} such tensors); this model's layout is not supported in place"
        )


def audit(model: torch.nn.Module, where: CheckpointMap) -> Audit:
    """Parameters and tensors that the map says nothing about."""
    written = {where.targets[p.target].name for pieces in where.pieces.values() for p in pieces}
    parameters = {name for name, p in model.named_parameters() if p.numel()}
    known = {target.name for target in where.targets}
    return Audit(
        unwritten=tuple(sorted((parameters & known) - written)),
        derived=tuple(sorted(_derived(model))),
    )


def absorbed_names(model: torch.nn.Module, where: CheckpointMap) -> list[str]:
    """Checkpoint tensors that latent attention (MLA) copies into products of its own after loading.

    An update in place reaches the parameter and not the copies that the kernels read.
    """
    copies = any(hasattr(module, copy) for module in model.modules() for copy in _MLA_COPIES)
    return [name for name in where.pieces if copies and ".kv_b_proj." in name]


def _derived(model: torch.nn.Module) -> Iterable[str]:
    owned = {storage_id(t) for t in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            for tensor in _held(value):
                if tensor.numel() > 1 and storage_id(tensor) not in owned:
                    yield f"{path}.{attribute} {tuple(tensor.shape)}"


def _held(value: object) -> Iterable[torch.Tensor]:
    """A tensor attribute itself, or tensors in the closure of a function attribute."""
    if isinstance(value, torch.Tensor):
        yield value
    for cell in getattr(value, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch.Tensor):
            yield cell.cell_contents
