"""The encodings we compare with, re-created from their descriptions: sizes only.

* seed: int32 positions and bf16 values (the blog, TRL 5417); our own seed encoding writes it.
* seed+zstd: that, compressed whole.
* pulse: PULSE (arXiv 2602.03839) codes sorted positions as small gaps, keeps 16-bit values, and
  compresses all with zstd-1; here gaps of the flat positions in uint16.
* slime: the dense XOR of all weights, zstd-1 (slime's default delta).
"""

import numpy as np
import zstandard

from bench.deltas import Step


def seed_zstd(step: Step) -> int:
    """Bytes."""
    return len(_squeezed(b"".join([*_local_indices(step), step.values.tobytes()])))


def pulse(step: Step) -> int:
    """Bytes. A gap beyond uint16 is split by empty steps, which are rare."""
    gaps = np.diff(step.indices.astype(np.int64), prepend=-1) - 1
    escapes = int((gaps >> 16).sum())
    body = (gaps & 0xFFFF).astype(np.uint16).tobytes() + b"\xff\xff" * escapes
    return len(_squeezed(body + step.values.tobytes()))


def slime(step: Step) -> int:
    """Bytes."""
    dense = np.zeros(step.base.flat.size, np.uint16)
    dense[step.indices] = step.old ^ step.values
    return len(_squeezed(dense.tobytes()))


def _local_indices(step: Step) -> list[bytes]:
    return [patch.indices.tobytes() for patch in step.patches()]


def _squeezed(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(body)
