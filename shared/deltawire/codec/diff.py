"""The shadow: the published bits, and what the training weights differ from them.

Exactly one extra copy of the weights is kept, in the published dtype. It replaces a snapshot
before each optimizer step: a diff is taken against what was really published, so skipped steps,
failed uploads and several optimizer steps per sync all come out right. ``diff`` rounds, compares
and moves the shadow in one pass; what it moved stays *pending* until the version is committed.

    shadow = Shadow.of(model.named_parameters(), layout)   # version 0
    patches = shadow.diff(model.named_parameters())        # training waits for this only
    ...encode, upload, commit the version...
    shadow.commit()                                        # or rollback() when it failed
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock

import numpy as np
import torch

from deltawire.codec import kernels
from deltawire.codec.bits import BitArray, IndexArray, bits_of, torch_type
from deltawire.codec.diff_device import DeviceBits
from deltawire.codec.digest import Digest, digest_full
from deltawire.codec.kernels import Kernels
from deltawire.codec.kernels_numpy import rounded
from deltawire.codec.parallel import mapped
from deltawire.codec.patch import Layout, OldValues, SparsePatch, TensorLayout
from deltawire.codec.sweep import ROOM, Sweep
from deltawire.protocol.errors import LayoutMismatch

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""``model.named_parameters()`` or any like it. Names outside the layout (tied) are passed over."""

_Members = list[tuple[TensorLayout, torch.Tensor]]

_LINE_BYTES = 64
"""Tensors of the shadow begin on cache lines."""
_CALL_ELEMENTS = 1 << 16
"""What a tensor costs beyond its elements, in elements: dealing out to threads counts it."""
_CAST_CHUNK = 1 << 20
"""Elements cast at a time where no fused loop exists (fp32 masters published as fp16)."""


class Shadow:
    """The published bits of every stored tensor. Safe to use from a training and a commit thread.

    Diffs may overlap commits: each ``diff`` pushes a pending entry, ``commit`` drops the oldest,
    ``rollback`` undoes every pending one, newest first, so that the next diff finds it all again.
    """

    def __init__(
        self,
        layout: Layout,
        bits: Mapping[str, BitArray],
        *,
        loops: Kernels | None = None,
        on_device: bool | None = None,
    ) -> None:
        """`bits` are taken over; copied only where they cannot be written. `on_device` compares
        where the weights live, with a second copy of the bits there (diff_device.py); None: when
        they are not on the CPU."""
        self.layout = layout
        self._bits = {name: _in_place(tensor, bits) for name, tensor in layout.items()}
        self._addresses = {name: held.ctypes.data for name, held in self._bits.items()}
        self._pending: deque[list[SparsePatch]] = deque()
        self._lock = Lock()
        self._most_found = 0
        self._on_device = on_device
        self._beside: DeviceBits | None = None
        self._loops = loops if loops is not None else kernels.load()

    @classmethod
    def of(
        cls,
        named_tensors: NamedTensors,
        layout: Layout,
        *,
        loops: Kernels | None = None,
        on_device: bool | None = None,
    ) -> "Shadow":
        """The shadow of weights as they are now: the base model, or a restored checkpoint."""
        shadow = cls(layout, _room_for(layout), loops=loops, on_device=on_device)
        for name, tensor in _chosen(named_tensors, layout):
            shadow._publish_dense(layout[name], tensor)
        return shadow

    @property
    def pending(self) -> int:
        """Diffs that are neither committed nor rolled back."""
        return len(self._pending)

    def diff(self, named_tensors: NamedTensors, *, threads: int | None = None) -> list[SparsePatch]:
        """What differs from the published bits, with old values, in layout order; moves the shadow.

        `threads` share the tensors on the CPU; None: as many as torch may use, which has nothing
        to do meanwhile. Raises LayoutMismatch, and leaves the shadow as it was, when a tensor is
        missing, twice, of another shape, or of a dtype that does not lead to the published one.
        """
        with self._lock:
            found = dict(_chosen(named_tensors, self.layout))
            there = {n: t for n, t in found.items() if self._is_beside(t)}
            here = {n: t for n, t in found.items() if n not in there}
            patches = self._diff_beside(there) if there else {}
            patches |= self._diff_here(here, threads or torch.get_num_threads())
            changed = [patches[n] for n in self.layout if n in patches and patches[n].changed]
            self._pending.append(changed)
            return changed

    def commit(self) -> None:
        """The oldest pending diff is published: it will not be undone."""
        with self._lock:
            self._pending.popleft()

    def rollback(self) -> None:
        """Undo every pending diff: the shadow is again what was last committed."""
        with self._lock:
            while self._pending:
                for patch in self._pending.pop():
                    assert patch.old is not None  # diff always records it
                    self._loops.scatter(self._bits[patch.name], patch.indices, patch.old)
                    if self._beside is not None and patch.name in self._beside:
                        self._beside.restore(patch)

    def named_bits(self) -> Iterator[tuple[str, BitArray]]:
        """Every tensor's bits in layout order, pending diffs included. Views: do not write."""
        for name in self.layout:
            yield name, self._bits[name]

    def digest(self) -> Digest:
        """Full digest of what the shadow holds, pending diffs included."""
        with self._lock:
            return digest_full(self.named_bits(), self.layout)

    def before(self, patches: Sequence[SparsePatch]) -> OldValues:
        """The weights under a pending diff (the list that ``diff`` returned), for encoders."""
        return _Before(self, patches)

    def _is_beside(self, tensor: torch.Tensor) -> bool:
        on_device = self._on_device
        return tensor.device.type != "cpu" if on_device is None else on_device

    def _diff_beside(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, SparsePatch]:
        """Compare on the weights' device; the host's bits follow in O(changes)."""
        if self._beside is None:
            self._beside = DeviceBits(self.layout, self._bits, tensors)
        patches = {patch.name: patch for patch in self._beside.diff(tensors)}
        for patch in patches.values():
            self._loops.scatter(self._bits[patch.name], patch.indices, patch.values)
        return patches

    def _diff_here(
        self, tensors: Mapping[str, torch.Tensor], threads: int
    ) -> dict[str, SparsePatch]:
        """Compare on the CPU, the tensors dealt out to threads by size."""
        held = [0] * threads
        owner: dict[str, int] = {}
        for name in sorted(tensors, key=lambda name: -self.layout[name].numel):
            owner[name] = least = held.index(min(held))
            held[least] += self.layout[name].numel + _CALL_ELEMENTS
        hands = [[n for n in tensors if owner[n] == hand] for hand in range(threads)]

        def compare(hand: list[str]) -> list[SparsePatch]:
            return list(self._sweep([(self.layout[name], tensors[name]) for name in hand]))

        found = mapped(compare, hands, threads=threads)
        self._most_found = max(sum(patch.changed for patch in patches) for patches in found)
        return {patch.name: patch for patches in found for patch in patches}

    def _sweep(self, hand: Iterable[tuple[TensorLayout, torch.Tensor]]) -> Iterator[SparsePatch]:
        """One thread's share: what is of one kind is compared in one call."""
        kinds: dict[tuple[torch.dtype, str, object], _Members] = {}
        for tensor, source in hand:
            kind = (source.dtype, tensor.dtype, tensor.index_type)
            kinds.setdefault(kind, []).append((tensor, source))
        room = max(ROOM, ROOM // 2 + self._most_found * 5 // 4)
        for (dtype, published, _), members in kinds.items():
            rounds = (dtype, published) == (torch.float32, "BF16")
            sweep = Sweep(self._loops, members[0][0], rounds=rounds, room=room)
            if rounds or dtype == torch_type(published):
                yield from self._compared(sweep, members)
            else:
                yield from self._cast_and_compared(sweep, members)

    def _compared(self, sweep: Sweep, members: _Members) -> Iterator[SparsePatch]:
        for tensor, source in members:
            sweep.add(source, self._addresses[tensor.name])
        begin = 0
        for (tensor, _), end in zip(members, sweep.run(), strict=True):
            if end > begin:
                yield sweep.patch(tensor.name, begin, end)
            begin = end

    def _cast_and_compared(self, sweep: Sweep, members: _Members) -> Iterator[SparsePatch]:
        """Tensors that no loop casts in passing, piece by piece."""
        for tensor, source in members:
            before = sweep.found
            flat = source.detach().reshape(-1)
            for begin in range(0, tensor.numel, _CAST_CHUNK):
                part = flat[begin : begin + _CAST_CHUNK].to(torch_type(tensor.dtype))
                at = self._addresses[tensor.name] + begin * tensor.bits.itemsize
                sweep.add(part, at, begin=begin)
                sweep.run()
            if sweep.found > before:
                yield sweep.patch(tensor.name, before, sweep.found)

    def _publish_dense(self, tensor: TensorLayout, source: torch.Tensor) -> None:
        """Take the tensor as published, without recording changes."""
        shadow = self._bits[tensor.name]
        flat = source.detach().reshape(-1)
        for begin in range(0, tensor.numel, _CAST_CHUNK):
            part = flat[begin : begin + _CAST_CHUNK]
            shadow[begin : begin + part.numel()] = published_bits(part, tensor.dtype)


def _room_for(layout: Layout) -> dict[str, BitArray]:
    """Arrays for every tensor, cut out of one allocation: large pages hold it, and the diff does
    not wait for the address translation of many small ones."""
    places: dict[str, int] = {}
    end = 0
    for tensor in layout.values():
        places[tensor.name] = end
        end += -(-tensor.nbytes // _LINE_BYTES) * _LINE_BYTES
    memory = np.empty(end, np.uint8)
    return {
        tensor.name: memory[places[tensor.name] :][: tensor.nbytes].view(tensor.bits)
        for tensor in layout.values()
    }


def _in_place(tensor: TensorLayout, bits: Mapping[str, BitArray]) -> BitArray:
    """Memory that the loops may write to. Raises LayoutMismatch where the tensor does not fit."""
    held = bits.get(tensor.name)
    if held is None or held.size != tensor.numel or held.dtype != tensor.bits:
        wanted = f"{tensor.numel} elements of {tensor.bits}"
        found = "none" if held is None else f"{held.size} of {held.dtype}"
        raise LayoutMismatch(f"{tensor.name}: the shadow needs {wanted}, found {found}")
    return np.require(held.reshape(-1), requirements=["C", "W"])


def published_bits(source: torch.Tensor, dtype: str) -> BitArray:
    """Bits of a tensor as published in `dtype`. fp32 -> bf16 rounds as the diff does."""
    if source.dtype == torch.float32 and dtype == "BF16":
        return rounded(bits_of(source))
    return bits_of(source.to(torch_type(dtype)))


def _chosen(named_tensors: NamedTensors, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """The layout's tensors out of those given, checked. Raises LayoutMismatch."""
    missing = set(layout)
    for name, source in named_tensors:
        if name not in layout:
            continue
        if name not in missing:
            raise LayoutMismatch(f"{name} was given twice")
        missing.discard(name)
        tensor = layout[name]
        if tuple(source.shape) != tensor.shape:
            raise LayoutMismatch(f"{name}: shape {tensor.shape} expected, found {source.shape}")
        wanted = torch_type(tensor.dtype)
        if source.dtype != wanted and not (
            source.dtype == torch.float32 and wanted.is_floating_point
        ):
            raise LayoutMismatch(f"{name}: {source.dtype} cannot be published as {tensor.dtype}")
        yield name, source
    if missing:
        raise LayoutMismatch(f"{len(missing)} tensors were not given, among them {min(missing)}")


class _Before:
    """A shadow as it was before one pending diff: later diffs and that one are looked through."""

    def __init__(self, shadow: Shadow, patches: Sequence[SparsePatch]) -> None:
        self._shadow = shadow
        self._patches = patches

    def gather(self, name: str, indices: IndexArray) -> BitArray:
        """See OldValues."""
        if indices.size == 0:
            return np.empty(0, self._shadow.layout[name].bits)
        begin, end = int(indices[0]), int(indices[-1]) + 1
        return self.read(name, begin, end)[indices - begin]

    def read(self, name: str, begin: int, end: int) -> BitArray:
        """See OldValues. A copy with the changed places put back."""
        with self._shadow._lock:
            bits = self._shadow._bits[name][begin:end].copy()
            undone = self._undone(name)
        for patch in undone:
            assert patch.old is not None  # diff always records it
            first, last = np.searchsorted(patch.indices, [begin, end])
            bits[patch.indices[first:last] - begin] = patch.old[first:last]
        return bits

    def _undone(self, name: str) -> list[SparsePatch]:
        """This tensor's patches from the newest pending diff back to ours."""
        found: list[SparsePatch] = []
        for pending in reversed(self._shadow._pending):
            found += [patch for patch in pending if patch.name == name]
            if pending is self._patches:
                return found
        raise LayoutMismatch("this diff is no longer pending: its base cannot be given back")
