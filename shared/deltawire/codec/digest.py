"""The digest of a model's weights: one sum over elements, updated in O(changes) by both ends.

digest = sum over elements of mix(position, bits) mod 2^64, in two lanes with different constants,
written as 32 hex digits. `position` counts elements in layout order over all stored tensors; tied
names are stored once. Because it is a sum, a delta moves it by mix(i, new) - mix(i, old) for each
changed element: the cost follows what changed, not the model.

It catches a wrong base, a lost or doubled delta and flipped bits; it is no signature. Files are
protected by their sha256. The running digest cannot see a memory fault: recompute now and then.

mix: key = h ^ bits with p = position * 0x9E3779B97F4A7C15, h = p ^ (p >> 32); then lane a is
key * 0xD6E8FEB86659FD93, x ^= x >> 32, * 0xBF58476D1CE4E5B9, x ^= x >> 29 and lane b is
(key ^ 0xA0761D6478BD642F) * 0x94D049BB133111EB, x ^= x >> 31, * 0xFF51AFD7ED558CCD, x ^= x >> 32
(constants of splitmix64 and murmur3's finaliser).
"""

import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray, bits_of
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.errors import DigestMismatch, LayoutMismatch, MalformedObject
from deltawire.protocol.header import ObjectHeader

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Digest:
    """Two 64-bit lanes. ``str(digest)`` is what headers and links carry."""

    a: int = 0
    b: int = 0

    def __str__(self) -> str:
        return f"{self.a:016x}{self.b:016x}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``. Raises MalformedObject."""
        if len(text) != 32 or not set(text) <= set(string.hexdigits.lower()):
            raise MalformedObject(f"a digest has 32 hex digits, found {text[:40]!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))

    def plus(self, lanes: tuple[int, int]) -> "Digest":
        """Both lanes moved."""
        return Digest((self.a + lanes[0]) & _MASK, (self.b + lanes[1]) & _MASK)

    def updated(self, patches: Iterable[SparsePatch], layout: Layout) -> "Digest":
        """The digest after the patches. Each must carry `old`. O(changes)."""
        loops = kernels.load()
        digest = self
        for patch in patches:
            if patch.old is None:
                raise LayoutMismatch(f"{patch.name}: no old values; gather them first")
            offset = layout[patch.name].offset
            digest = digest.plus(
                loops.digest_changes(patch.indices, patch.old, patch.values, offset)
            )
        return digest


def digest_full(named_bits: Iterable[tuple[str, BitArray]], layout: Layout) -> Digest:
    """The digest of every stored tensor, from flat bit arrays. One pass over the weights.

    Raises LayoutMismatch unless exactly the layout's tensors are given, each once and whole.
    """
    missing = set(layout)

    def each() -> Iterator[tuple[str, BitArray]]:
        for name, bits in named_bits:
            if name not in missing and name in layout:
                raise LayoutMismatch(f"{name} was given twice")
            missing.discard(name)
            yield name, bits

    digest = digest_part(each(), layout)
    if missing:
        raise LayoutMismatch(f"{len(missing)} tensors were not given, among them {min(missing)}")
    return digest


def digest_part(named_bits: Iterable[tuple[str, BitArray]], layout: Layout) -> Digest:
    """What some of the layout's tensors add to the digest: parts of all of them sum up to it."""
    loops = kernels.load()
    digest = Digest()
    for name, bits in named_bits:
        tensor = layout[name]
        if bits.size != tensor.numel or bits.dtype != tensor.bits:
            raise LayoutMismatch(
                f"{name}: {tensor.numel} elements of {tensor.bits} expected, "
                f"found {bits.size} of {bits.dtype}"
            )
        digest = digest.plus(loops.digest_dense(bits, tensor.offset))
    return digest


def digest_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]], layout: Layout) -> Digest:
    """``digest_full`` of live tensors; names outside the layout (tied ones) are passed over."""
    return digest_full(
        ((name, bits_of(tensor)) for name, tensor in named_tensors if name in layout), layout
    )


def check_digests(
    header: ObjectHeader, patches: Sequence[SparsePatch], layout: Layout, *, held: Digest, name: str
) -> Digest:
    """The digest after the patches; raises DigestMismatch unless both ends of the header hold.

    `held` is the running digest of the weights under the delta; patches carry `old`. A whole
    adapter names no base: only where it leads is announced.
    """
    if header.base_digest != str(held) and not header.is_adapter:
        raise DigestMismatch(name, expected=header.base_digest, actual=str(held))
    new = held.updated(patches, layout)
    if header.new_digest != str(new):
        raise DigestMismatch(name, expected=header.new_digest, actual=str(new))
    return new
