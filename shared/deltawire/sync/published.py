"""What a publisher asks of the bits it published, whether one process holds them or many ranks."""

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from deltawire.codec.bits import BitArray
from deltawire.codec.diff import NamedTensors, Shadow
from deltawire.codec.digest import Digest
from deltawire.codec.patch import Layout, OldValues, SparsePatch


class PublishedBits(Protocol):
    """The shadow of a run's tensors. One diff is pending at a time."""

    @property
    def layout(self) -> Layout:
        """The run's tensors, in order."""
        ...

    def diff(self, named_tensors: NamedTensors) -> list[SparsePatch]:
        """What differs from the published bits, with old values; moves the shadow."""
        ...

    def commit(self) -> None:
        """The pending diff is published."""
        ...

    def rollback(self) -> None:
        """The pending diff is not published: the next one finds it again."""
        ...

    def before(self, patches: Sequence[SparsePatch]) -> OldValues | None:
        """The weights under the pending diff; None where no process holds them all."""
        ...

    def digest(self) -> Digest:
        """Full digest of the published bits."""
        ...

    def snapshot(self) -> Mapping[str, BitArray] | None:
        """A copy of every tensor's bits; None where no process holds them all."""
        ...


class WholeBits(Shadow):
    """All tensors in this process."""

    @classmethod
    def holding(cls, named_tensors: NamedTensors, layout: Layout) -> Self:
        """The bits of weights as they are now."""
        return cls(layout, dict(Shadow.of(named_tensors, layout).named_bits()))

    def snapshot(self) -> Mapping[str, BitArray]:
        """A copy: an anchor is written from it while the shadow moves on."""
        return {name: bits.copy() for name, bits in self.named_bits()}
