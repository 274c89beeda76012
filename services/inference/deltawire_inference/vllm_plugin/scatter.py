"""Store values at many places of one flat tensor: the only work inside a swap.

On a CPU the cost is the memory system's. Each changed element is on another cache line and, at 0.5
% changed, on every 4 KiB page; walking the page table for each costs more than the stores
themselves. So offsets stay int32, the loop is compiled (codec kernels), and the weights are moved
to huge pages once (huge_pages.py).

On a GPU one `index_copy_` per runtime tensor runs on the worker's stream, behind the step before
and in front of the step after; addresses do not change, so CUDA graphs stay valid.
"""

from __future__ import annotations

import torch

from deltawire.codec import kernels
from deltawire.codec.bits import bits_of
from deltawire_inference.vllm_plugin.live import bits


def scatter(flat: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """`flat[offsets[i]] = values[i]`, in place, bit for bit.

    Args:
        flat: [n], a whole storage.
        offsets: int32 or int64 [k] on flat's device, each in [0, n); checked by the caller.
        values: [k], flat's dtype and device.
    """
    if flat.device.type == "cpu":
        kernels.load().scatter(bits_of(flat), offsets.numpy(), bits_of(values))
    else:
        bits(flat).index_copy_(0, offsets.to(torch.int64), bits(values))


def warm_up(flat: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """Compile what `scatter` of such arguments needs, without writing anything."""
    scatter(flat, offsets[:0], values[:0])
