"""Compile the inner loops ahead of their first use: about seven seconds, once for each machine.

    python -m deltawire.codec.warm

takes a tiny model through diff, every encoding and apply, and leaves the compiled loops in numba's
cache. Worth a line in an image, run by the user that the service runs as; without it the first
update pays. Does nothing of use where numba is absent.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from deltawire.codec.anchor import iter_anchor, write_anchor
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.decode import decode_delta
from deltawire.codec.diff import Shadow
from deltawire.codec.digest import digest_full
from deltawire.codec.encode import Encoding, encode_delta
from deltawire.codec.patch import Layout
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.versions import PolicyVersion

_ENCODINGS: tuple[Encoding, ...] = ("compact", "classes", "absolute")


def warm() -> None:
    """One round trip of fp32 masters and one of bf16 weights, published as bf16."""
    masters = torch.randn(100, 200, generator=torch.Generator().manual_seed(0))
    moved = masters * (1 + torch.rand(100, 200, generator=torch.Generator().manual_seed(1)) / 200)
    for dtype in (torch.float32, torch.bfloat16):
        _round_trip(masters.to(dtype), moved.to(dtype))


def _round_trip(before: torch.Tensor, after: torch.Tensor) -> None:
    layout, _ = Layout.of_tensors([("w", before)])
    shadow = Shadow.of([("w", before)], layout)
    live = LiveTensors([("w", before.to(torch.bfloat16).clone())], layout)
    digest = shadow.digest()
    patches = shadow.diff([("w", after)])
    header = ObjectHeader(sparse=True, model_version=PolicyVersion(1))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "object.safetensors"
        write_anchor(shadow.named_bits(), header, path, layout=layout, packed=True)
        digest_full(iter_anchor(path, layout), layout)
        for encoding in _ENCODINGS:
            base = shadow.before(patches)
            encode_delta(patches, header, path, layout=layout, encoding=encoding, base=base)
            staged = decode_delta(path, layout, live)
    digest.updated(staged, layout)
    scatter(live, staged)


if __name__ == "__main__":
    warm()
