"""Attention of transformers models over our own KV cache.

Registered with transformers as an attention implementation of its own. The model runs on one flat
axis of tokens of many sequences; only here are they told apart. Covers plain, grouped-query and
sliding-window attention; anything else a model asks for is refused at the warm-up.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from deltawire.protocol.errors import EngineError
from deltawire_inference.engines.torch.kv import KVCache
from deltawire_inference.engines.torch.plan import Block, StepPlan

ATTENTION = "deltawire"
"""Name under which transformers knows it."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What attention needs of a step; travels through the model as a keyword."""

    plan: StepPlan
    cache: KVCache


def install_attention() -> None:
    """Tell transformers of it. May be called again."""
    AttentionInterface.register(ATTENTION, attend)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: Step,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer.

    query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim]; the result is
    [1, tokens, heads, dim]. EngineError for a kind of attention this does not know.
    """
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise EngineError(
                f"this model's attention uses {name}, which the torch engine does not know; "
                "set INFERENCE_ENGINE=vllm"
            )
    layer = cast(int, module.layer_idx)
    plan, cache = step.plan, step.cache
    cache.write(layer, plan.slots, plan.positions, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    for block in plan.blocks:
        out[block.tokens] = _attend_block(
            query[0][:, block.tokens], cache.data[layer], block, scaling, sliding_window
        )
    return out[None], None


def _attend_block(
    query: torch.Tensor, kv: torch.Tensor, block: Block, scaling: float, window: int | None
) -> torch.Tensor:
    """[heads, rows * queries, dim] against [2, rows, kv_heads, length, dim] -> [.., heads, dim].

    Query heads that share a key head are folded onto the query axis, so keys are never repeated.
    """
    heads, tokens, dim = query.shape
    kv_heads = kv.shape[2]
    repeats, rows = heads // kv_heads, tokens // block.queries
    folded = query.reshape(kv_heads, repeats, rows, block.queries, dim).permute(2, 0, 1, 3, 4)
    keys, values = kv[:, block.slots, :, : block.keys]
    mixed = scaled_dot_product_attention(
        folded.reshape(rows, kv_heads, repeats * block.queries, dim),
        keys,
        values,
        attn_mask=block.mask(window=window, repeats=repeats, dtype=query.dtype),
        scale=scaling,
    )
    unfolded = mixed.reshape(rows, kv_heads, repeats, block.queries, dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(tokens, heads, dim)
