"""Ask the kernel to back a CPU worker's weights with huge pages.

A sparse update touches nearly every 4 KiB page of the weights, so most of its time would go to page
table walks. 2 MiB pages cut them by a factor of 512. Contents and addresses stay as they are;
where the kernel says no (`transparent_hugepage/enabled` is `never`, an old kernel), nothing
changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise

import torch

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Linux 6.1 and newer: collapse now, not when the kernel gets to it."""
_PAGE_BYTES = 4096
_HUGE_BYTES = 2 * 2**20


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Move CPU tensors to huge pages where that is allowed; returns the bytes it was done for."""
    spans = [
        (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        for storage in (t.untyped_storage() for t in tensors if t.device.type == "cpu")
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for begin, end in merged_spans(spans):
        allowed = libc.madvise(begin, end - begin, _MADV_HUGEPAGE) == 0
        if allowed and libc.madvise(begin, end - begin, _MADV_COLLAPSE) == 0:
            moved += end - begin
    return moved


def merged_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Address ranges [begin, end) widened to pages and joined where they touch.

    Tensors are smaller than a huge page as often as not, but lie side by side. What is still too
    small for one huge page is left out.
    """
    pages = sorted(
        (begin // _PAGE_BYTES * _PAGE_BYTES, -(-end // _PAGE_BYTES) * _PAGE_BYTES)
        for begin, end in spans
    )
    borders = [i + 1 for i, (one, two) in enumerate(pairwise(pages)) if two[0] > one[1]]
    groups = [pages[i:j] for i, j in pairwise([0, *borders, len(pages)])]
    joined = [(group[0][0], max(end for _, end in group)) for group in groups if group]
    return [(begin, end) for begin, end in joined if end - begin >= _HUGE_BYTES]
