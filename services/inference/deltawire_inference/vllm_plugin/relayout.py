"""Backends that permute a tensor after loading, and how to learn the permutation.

The repack itself is asked: it is given one block whose elements hold their own position, a few
bits at a time (small integers are exact in every dtype), and what comes back is the order. A
backend enters by adding a `RelayoutRule` to `RULES`; `verify.py` decides whether the result is
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deltawire.protocol.errors import ReplicaBroken
from deltawire_inference.vllm_plugin.checkpoint_map import CheckpointMap, Relayout
from deltawire_inference.vllm_plugin.trace import storage_id

_DIGIT_BITS = 7
"""0..127 are exact in bfloat16, float16 and float32."""

Repack = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackedTensor:
    """A runtime tensor whose blocks a backend repacked after loading."""

    tensor: torch.Tensor
    block: tuple[int, ...]
    """Shape of one block (one expert) as loaded."""
    repack: Repack
    """Block as loaded -> block as it stands, any shape of equal size."""
    kind: tuple[object, ...]
    """Tensors of equal kind share one permutation."""


RelayoutRule = Callable[[torch.nn.Module], Iterator[RepackedTensor]]
"""Module -> its repacked tensors; empty for a module of another backend."""


def add_relayouts(
    model: torch.nn.Module, where: CheckpointMap, rules: tuple[RelayoutRule, ...]
) -> None:
    """Learn and add the permutation of every repacked tensor that a rule recognises."""
    targets = {target.name: i for i, target in enumerate(where.targets)}
    by_storage = {
        storage_id(t): targets[name]
        for named in (model.named_parameters(), model.named_buffers())
        for name, t in named
        if name in targets
    }
    learned: dict[tuple[object, ...], Relayout] = {}
    for module in model.modules():
        for repacked in (found for rule in rules for found in rule(module)):
            if repacked.kind not in learned:
                learned[repacked.kind] = Relayout(order=learn_order(repacked))
            where.relayouts[by_storage[storage_id(repacked.tensor)]] = learned[repacked.kind]


def learn_order(repacked: RepackedTensor) -> torch.Tensor:
    """int32 [block elements]: where each element of a loaded block stands after the repack.

    Raises:
        ReplicaBroken: The repack is not a permutation (it pads, drops or computes).
    """
    elements = torch.Size(repacked.block).numel()
    position = torch.arange(elements)
    arrived = torch.zeros(elements, dtype=torch.int64)
    for shift in range(0, elements.bit_length(), _DIGIT_BITS):
        digit = (position >> shift) & ((1 << _DIGIT_BITS) - 1)
        packed = repacked.repack(digit.to(repacked.tensor.dtype).view(repacked.block))
        if packed.numel() != elements:
            raise ReplicaBroken(f"repacking a block of {elements} gave {packed.numel()} elements")
        arrived |= packed.reshape(-1).to(torch.int64) << shift
    if not torch.equal(arrived.sort().values, position):
        raise ReplicaBroken(f"the repack of {repacked.kind} is not a permutation of its block")
    order = torch.empty(elements, dtype=torch.int32)
    order[arrived] = position.int()
    return order


def cpu_fused_experts(module: torch.nn.Module) -> Iterator[RepackedTensor]:
    """vLLM's CPU fused experts: w13 and w2 are repacked per expert for the kernel's tiles."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    lineage = (base.__name__ for base in type(experts).__mro__)
    if experts is None or "CPUUnquantizedExperts" not in lineage or experts._use_zentorch:
        return
    from vllm._custom_ops import cpu_prepack_moe_weight

    isa = experts.isa

    def repack(block: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = cpu_prepack_moe_weight(block.unsqueeze(0), isa)
        return packed

    for name in ("w13_weight", "w2_weight"):
        tensor = getattr(module, name)
        block = tuple(tensor.shape[1:])
        kind = ("cpu_fused_experts", isa, block)
        yield RepackedTensor(tensor=tensor, block=block, repack=repack, kind=kind)


RULES: tuple[RelayoutRule, ...] = (cpu_fused_experts,)
