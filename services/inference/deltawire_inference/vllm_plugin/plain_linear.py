"""CPU workers only: keep linear weights as plain parameters.

On a CPU, vLLM packs every linear weight into a private buffer after loading and leaves an empty
parameter behind, so nothing could be patched in place, and a tied head would keep its own packed
copy. With this the weights stay where the loader put them, as on a GPU. Logprobs differ from the
packed kernels' in the last digits, so compare like with like.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_linear_weights_plain() -> None:
    """Replace vLLM's CPU linear dispatch by `torch.nn.functional.linear`. Idempotent."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _use_plain_linear


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


def ask_for_amx() -> None:
    """Ask the kernel for AMX before the first forward pass.

    A worker that skips its warm-up (eager mode with a fixed KV size) otherwise dies of SIGILL on
    the first short prompt: nothing has requested the permission yet.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
