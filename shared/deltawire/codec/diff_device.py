"""The diff on an accelerator: one pass over flat buckets, one ``nonzero`` each, pinned copies back.

Torch operations only, so the same code runs, and is tested, on CPU tensors. The published bits
lie beside the weights as flat buckets of one width; only positions and values of what changed
cross to the host, asynchronously where there is a stream for it, with one wait at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltawire.codec.bits import BitArray, flat_bits, torch_type
from deltawire.codec.patch import Layout, SparsePatch

BUCKET_ELEMENTS = 1 << 26
"""Elements of a bucket: the temporaries of a diff take about four times its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Tensors of one width, one after another."""

    names: list[str]
    kept: torch.Tensor
    """[elements] signed integers: the published bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one bucket gave, on its way to the host."""

    bucket: _Bucket
    positions: torch.Tensor
    values: torch.Tensor
    old: torch.Tensor


class DeviceBits:
    """A copy of the published bits beside the weights. Moves and is taken back with the shadow."""

    def __init__(
        self,
        layout: Layout,
        published: Mapping[str, BitArray],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """`tensors` says which names live on which device; `published` are the bits to start at."""
        self._layout = layout
        self._buckets = [
            _Bucket(names=names, kept=_upload([published[n] for n in names], device))
            for device, names in _grouped(layout, tensors)
        ]
        self._place = {
            name: (bucket, begin)
            for bucket in self._buckets
            for name, begin in zip(bucket.names, _begins(bucket.names, layout), strict=True)
        }

    def __contains__(self, name: object) -> bool:
        return name in self._place

    def diff(self, tensors: Mapping[str, torch.Tensor]) -> list[SparsePatch]:
        """What differs, with old values, in no particular order; moves the copy."""
        found = [self._diff_bucket(bucket, tensors) for bucket in self._buckets]
        for device in {part.positions.device for part in found if part.positions.is_cuda}:
            torch.cuda.synchronize(device)
        return [patch for part in found for patch in self._patches(part)]

    def restore(self, patch: SparsePatch) -> None:
        """Put the old values of one patch back."""
        assert patch.old is not None  # diff always records it
        bucket, begin = self._place[patch.name]
        where = torch.from_numpy(patch.indices.astype(np.int64) + begin)
        old = torch.from_numpy(patch.old.view(f"<i{patch.old.itemsize}"))
        bucket.kept.index_copy_(0, where.to(bucket.kept.device), old.to(bucket.kept.device))

    def _diff_bucket(self, bucket: _Bucket, tensors: Mapping[str, torch.Tensor]) -> _Found:
        fresh = torch.cat(
            [published_on_device(tensors[n], self._layout[n].dtype) for n in bucket.names]
        )
        positions = (fresh != bucket.kept).nonzero().view(-1)
        values, old = fresh[positions], bucket.kept[positions]
        bucket.kept.index_copy_(0, positions, values)
        return _Found(
            bucket=bucket,
            positions=_to_host(positions),
            values=_to_host(values),
            old=_to_host(old),
        )

    def _patches(self, part: _Found) -> Iterator[SparsePatch]:
        positions = part.positions.numpy()
        begins = _begins(part.bucket.names, self._layout)
        cuts = np.searchsorted(positions, [*begins[1:], part.bucket.kept.numel()]).tolist()
        low = 0
        for name, begin, high in zip(part.bucket.names, begins, cuts, strict=True):
            if high > low:
                tensor = self._layout[name]
                yield SparsePatch(
                    name=name,
                    indices=(positions[low:high] - begin).astype(tensor.index_type),
                    values=part.values[low:high].numpy().view(tensor.bits),
                    old=part.old[low:high].numpy().view(tensor.bits),
                )
            low = high


def published_on_device(source: torch.Tensor, dtype: str) -> torch.Tensor:
    """Flat signed bits of a tensor as published; fp32 to bf16 rounds as kernels.py does."""
    if source.dtype != torch.float32 or dtype != "BF16":
        return flat_bits(source.detach().to(torch_type(dtype)))
    bits = flat_bits(source)
    top = bits >> 16
    near = (bits + (0x7FFF + (top & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return torch.where(nan, top | 0x40, near).to(torch.int16)


def _grouped(
    layout: Layout, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.device, list[str]]]:
    """Names of one device and width, in layout order, up to a bucket's elements."""
    full: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in layout.items():
        if name not in tensors or not tensor.numel:
            continue
        kind = (tensors[name].device, tensor.bits.itemsize)
        names = full.setdefault(kind, [])
        held = sum(layout[n].numel for n in names)
        if names and held + tensor.numel > BUCKET_ELEMENTS:
            yield kind[0], names
            names = full[kind] = []
        names.append(name)
    for (device, _), names in full.items():
        yield device, names


def _begins(names: Sequence[str], layout: Layout) -> list[int]:
    sizes = [layout[name].numel for name in names]
    return [0, *np.cumsum(sizes[:-1]).tolist()] if sizes else []


def _upload(bits: Sequence[BitArray], device: torch.device) -> torch.Tensor:
    parts = [torch.from_numpy(part.view(f"<i{part.itemsize}")) for part in bits]
    return torch.cat(parts).to(device)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that may still be on its way: wait before it is read."""
    if not tensor.is_cuda:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
