"""Store values at many places of one flat tensor: the only work inside a swap.

On a CPU the cost is the memory system's (each store opens another cache line), so offsets stay
int32 and nothing is converted. On a GPU one `index_copy_` per runtime tensor runs on the worker's
stream, behind the step before and in front of the step after; addresses do not change, so CUDA
graphs stay valid.
"""

from __future__ import annotations

import torch


def scatter(flat: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """`flat[offsets[i]] = values[i]`, in place.

    Args:
        flat: [n], a whole storage.
        offsets: int32 or int64 [k], each in [0, n); checked by the caller.
        values: [k], flat's dtype and device.
    """
    flat.index_copy_(0, offsets.to(device=flat.device, dtype=torch.int64), values)
