"""Copies between a staged patch and the device its weights are on, beside the engine's own stream.

On a GPU the default stream would make the running step wait, so copies go through pinned memory on
a stream of their own and are complete when the block ends. On a CPU there is nothing to arrange.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside_the_engine(device: torch.device) -> Iterator[None]:
    """Run a block's device work on a side stream, and end when it has ended."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def copy_to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A private copy on `device`. The source may be a mapped file: its pages are read here."""
    if device.type != "cuda":
        return tensor.to(device=device, dtype=dtype, copy=True)
    return tensor.to(dtype).pin_memory().to(device, non_blocking=True)
