"""Store values at many places of one flat tensor: the only work inside a swap.

On a CPU the cost is the memory system's: every changed element is on another cache line, and half a
percent of changes touches every 4 KiB page, whose walk through the page table costs more than the
stores. So the weights are moved to huge pages once (huge_pages.py), and numpy's indexed store does
the rest. A compiled loop is a tenth faster, but its compiler would cost each worker 130 MB.

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
        offsets: int64 [k] on flat's device, each in [0, n); checked by the caller.
        values: [k], flat's dtype and device.
    """
    if flat.device.type == "cpu":
        kernels.load(compiled=False).scatter(bits_of(flat), offsets.numpy(), bits_of(values))
    else:
        bits(flat).index_copy_(0, offsets, bits(values))
