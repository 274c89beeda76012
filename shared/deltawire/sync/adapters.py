"""What a LoRA run does otherwise: only the adapter's published bits are kept, a version goes up as
a whole adapter or as a delta of it, and adapters can be merged into the base again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

from deltawire.codec.adapter import adapter_layout, base_layout, write_adapter
from deltawire.codec.bits import BitArray, tensor_of
from deltawire.codec.diff import NamedTensors
from deltawire.codec.digest import Digest, digest_part
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.protocol.adapters import AdapterManifest, adapter_key, adapter_part
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import LayoutMismatch
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind
from deltawire.store.base import Store
from deltawire.sync.published import WholeBits
from deltawire.sync.upload import upload_object


class AdapterBits:
    """The published bits of a LoRA run. The base is published once, so only its digest is kept."""

    def __init__(self, layout: Layout, adapter: WholeBits, *, base: Digest) -> None:
        self.layout = layout
        self._adapter, self._base = adapter, base

    @classmethod
    def out_of(cls, published: WholeBits, mine: WholeBits) -> Self:
        """Of a run that was entered: what is published, and what this trainer holds.

        Raises LayoutMismatch when this trainer's base is not the published one: what it trains
        would not be what replicas serve.
        """
        layout = published.layout
        part, base = adapter_layout(layout), base_layout(layout)
        bits = dict(published.named_bits())
        digest = digest_part(((name, bits[name]) for name in base), layout)
        if published is not mine:
            held = dict(mine.named_bits())
            found = digest_part(((name, held[name]) for name in base), layout)
            if found != digest:
                raise LayoutMismatch(
                    f"the base model here has digest {found}, the run was founded on {digest}; "
                    "give the same model, or choose another run id"
                )
        return cls(layout, WholeBits(part, {n: bits[n].copy() for n in part}), base=digest)

    def diff(self, named_tensors: NamedTensors) -> list[SparsePatch]:
        """See PublishedBits. Tensors of the base are passed over."""
        return self._adapter.diff(named_tensors)

    def commit(self) -> None:
        """See PublishedBits."""
        self._adapter.commit()

    def rollback(self) -> None:
        """See PublishedBits."""
        self._adapter.rollback()

    def before(self, patches: Sequence[SparsePatch]) -> OldValues | None:
        """See PublishedBits: the base is not here."""
        return None

    def digest(self) -> Digest:
        """See PublishedBits."""
        adapter = digest_part(self.named_bits(), self.layout)
        return self._base.plus((adapter.a, adapter.b))

    def snapshot(self) -> Mapping[str, BitArray] | None:
        """See PublishedBits: the base is not here."""
        return None

    def named_bits(self) -> Iterator[tuple[str, BitArray]]:
        """The adapter's bits, a pending diff included. Views: do not write."""
        return self._adapter.named_bits()


def goes_whole(links: Sequence[Link], *, delta_bytes: int, adapter_bytes: int) -> bool:
    """Whether a version goes up as a whole adapter and not as a delta.

    A delta must save something, and those since the last whole adapter may not outweigh it: so a
    replica that joins fetches the base and at most two adapters' bytes.
    """
    whole = [link.version for link in links if link.kind is not ObjectKind.DELTA]
    since = [
        link.bytes
        for link in links
        if link.kind is ObjectKind.DELTA and link.version > max(whole, default=0)
    ]
    return sum(since) + delta_bytes >= adapter_bytes


def upload_adapter(
    store: Store,
    bits: Iterable[tuple[str, BitArray]],
    header: ObjectHeader,
    *,
    layout: Layout,
    adapter: AdapterManifest,
    epoch: int,
    folder: Path,
) -> Link:
    """Write a whole adapter into `folder` and upload it under its own key."""
    path = folder / "adapter.safetensors"
    written = write_adapter(bits, header, path, layout=layout, adapter=adapter)
    return upload_object(store, path, written, kind=ObjectKind.ADAPTER, epoch=epoch)


def merged(
    bits: Mapping[str, BitArray], layout: Layout, adapter: AdapterManifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model's tensors, in its dtypes, with the adapter added: W + scale * B A in fp32."""

    def tensor(name: str) -> torch.Tensor:
        return tensor_of(bits[name], layout[name].dtype, layout[name].shape)

    for name in base_layout(layout):
        down = adapter_key(name.removesuffix(".weight"), "A")
        weight = tensor(name)
        if down in layout:
            up = adapter_key(name.removesuffix(".weight"), "B")
            change = tensor(up).float() @ tensor(down).float()
            weight = weight.float().add_(change, alpha=adapter.scale).to(weight.dtype)
        yield name, weight


def check_adapter(layout: Layout, adapter: AdapterManifest) -> None:
    """Raise LayoutMismatch unless each adapted layer has both halves, of the rank and of shapes
    that fit its weight."""
    part = adapter_layout(layout)
    modules = {found.module for name in part if (found := adapter_part(name)) is not None}
    if not modules:
        raise LayoutMismatch("a LoRA run without a tensor of an adapter")
    for module in sorted(modules):
        weight = layout[f"{module}.weight"]
        down, up = layout[adapter_key(module, "A")], layout[adapter_key(module, "B")]
        fits = len(weight.shape) == 2 and (down.shape, up.shape) == (
            (adapter.rank, weight.shape[1]),
            (weight.shape[0], adapter.rank),
        )
        if not fits:
            raise LayoutMismatch(
                f"{module}: an adapter of rank {adapter.rank} with shapes {down.shape} and "
                f"{up.shape} does not fit a weight of shape {weight.shape}"
            )
