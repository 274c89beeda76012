"""What a LoRA run does otherwise: only the adapter's published bits are kept, a version goes up as
a whole adapter or as a delta of it, and adapters can be merged into the base again."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

from deltawire.codec.adapter import adapter_layout, base_layout, write_adapter
from deltawire.codec.bits import BitArray, tensor_of
from deltawire.codec.diff import NamedTensors
from deltawire.codec.digest import Digest, digest_part
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.protocol.adapters import AdapterManifest, adapter_key
from deltawire.protocol.chain import Link
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.ledger import Ledger
from deltawire.sync.published import WholeBits
from deltawire.sync.upload import upload_object


class AdapterBits:
    """The published bits of a LoRA run. The base is published once, so only its digest is kept."""

    def __init__(self, layout: Layout, adapter: WholeBits, *, base: Digest) -> None:
        self.layout = layout
        self._adapter, self._base = adapter, base

    @classmethod
    def out_of(cls, published: WholeBits) -> Self:
        """Of a run that was entered; lets the base go."""
        layout, part = published.layout, adapter_layout(published.layout)
        bits = dict(published.named_bits())
        adapter = WholeBits(part, {name: bits[name].copy() for name in part})
        return cls(layout, adapter, base=base_digest(bits, layout))

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


class WholeAdapters:
    """Decides when a version goes up as a whole adapter, and sends it."""

    def __init__(
        self, store: Store, ledger: Ledger, bits: AdapterBits, adapter: AdapterManifest
    ) -> None:
        self._store, self._ledger, self._bits, self._adapter = store, ledger, bits, adapter
        self._adapter_bytes = adapter_layout(bits.layout).nbytes

    def better_than(self, delta_bytes: int) -> bool:
        """Whether to send the whole adapter instead of a delta of this size."""
        links = self._ledger.head.links
        return goes_whole(links, delta_bytes=delta_bytes, adapter_bytes=self._adapter_bytes)

    def upload(self, version: PolicyVersion, digest: Digest, folder: Path) -> Link:
        """The adapter as it stands, a pending diff included, in the store and not linked yet."""
        header = ObjectHeader(
            sparse=False,
            model_version=version,
            run_id=self._ledger.head.run_id,
            new_digest=str(digest),
        )
        path = folder / "adapter.safetensors"
        written = write_adapter(
            self._bits.named_bits(), header, path, layout=self._bits.layout, adapter=self._adapter
        )
        return self._ledger.under_free_key(
            lambda epoch: upload_object(
                self._store, path, written, kind=ObjectKind.ADAPTER, epoch=epoch
            )
        )


def goes_whole(links: Sequence[Link], *, delta_bytes: int, adapter_bytes: int) -> bool:
    """Whether a version goes up as a whole adapter and not as a delta.

    Deltas since the last whole adapter, this one among them, may not outweigh an adapter: so a
    replica that joins fetches the base and at most two adapters' bytes.
    """
    whole = max((link.version for link in links if link.base_version is None), default=0)
    since = [link.bytes for link in links if link.kind is ObjectKind.DELTA and link.version > whole]
    return sum(since) + delta_bytes >= adapter_bytes


def base_digest(bits: Mapping[str, BitArray], layout: Layout) -> Digest:
    """What the base model adds to the digest of every version of a LoRA run."""
    return digest_part(((name, bits[name]) for name in base_layout(layout)), layout)


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
