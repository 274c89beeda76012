"""How much memory the weights take under training, against what training all of them would take."""

from collections.abc import Iterable

import torch

from deltawire.protocol.control import TrainingMemory
from deltawire_trainer.policy import Policy

_MASTER_BYTES, _MOMENT_BYTES, _PUBLISHED_BYTES = 4, 8, 2
"""Of a trained parameter: fp32 master (and as much for its gradient), Adam's two moments, and the
published bits that diffs are taken against (bf16)."""


def training_memory(policy: Policy) -> TrainingMemory:
    """Masters, gradients, moments, working copy and published bits; activations are not in it."""
    trained, frozen = policy.working.values(), policy.frozen.values()
    separate = any(w is not m for w, m in zip(trained, policy.masters.values(), strict=True))
    base = frozen or trained
    return TrainingMemory(
        parameters=_count(base) + (_count(trained) if frozen else 0),
        trainable=_count(trained),
        bytes=_trained_bytes(trained, separate=separate) + _held_bytes(frozen),
        full_bytes=_trained_bytes(base, separate=separate),
    )


def _trained_bytes(weights: Iterable[torch.Tensor], *, separate: bool) -> int:
    """`separate`: the working copy is not the masters themselves."""
    held = list(weights)
    each = 2 * _MASTER_BYTES + _MOMENT_BYTES + _PUBLISHED_BYTES
    return each * _count(held) + (_held_bytes(held) if separate else 0)


def _held_bytes(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _count(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights)
