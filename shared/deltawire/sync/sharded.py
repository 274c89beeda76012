"""Publish a model whose parameters are sharded over ranks (FSDP2), without gathering them.

Each rank keeps the published bits of its own shards and diffs those; rank 0 receives positions and
values of what changed, O(changes), and publishes. Full tensors meet on rank 0 only for an anchor,
one after the other in the published dtype; that and the exchange of changes are collective and
happen inside `step()`, uploads do not. All ranks must call the same methods in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from deltawire.codec.bits import BitArray, IndexArray, word_of
from deltawire.codec.diff import NamedTensors, Shadow
from deltawire.codec.digest import Digest
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import DeltawireError, StoreError
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.founding import Entered
from deltawire.sync.loop_publisher import Commits, LoopPublisher
from deltawire.sync.model_weights import named_weights
from deltawire.sync.options import PublishOptions
from deltawire.sync.published import WholeBits
from deltawire.sync.publisher import Publisher
from deltawire.sync.shards import Part, local_of, part_here

_NOTHING, _COMMITTED, _ROLLED_BACK, _FAILED = range(4)
"""What rank 0 tells of the version before."""

Bytes = npt.NDArray[np.uint8]
EnterRun = Callable[[WholeBits, Mapping[str, str]], Entered]
"""Rank 0's way into the store: (whole bits, tied names) -> the run, entered."""


class Ranks:
    """The processes that train together, over a CPU group of their own."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def agreed(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers, on every rank."""
        told = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(told, src=dist.get_global_rank(self.group, 0), group=self.group)
        return told.tolist()

    def to_lead(self, mine: Bytes) -> list[Bytes]:
        """Every rank's bytes, on rank 0 in rank order; nothing on the others."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.size]), group=self.group)
        if not self.leads:
            if mine.size:
                lead = dist.get_global_rank(self.group, 0)
                dist.send(torch.from_numpy(mine), dst=lead, group=self.group)
            return []
        received = [mine]
        for rank in range(1, self.size):
            buffer = torch.empty(int(sizes[rank]), dtype=torch.uint8)
            if buffer.numel():
                source = dist.get_global_rank(self.group, rank)
                dist.recv(buffer, src=source, group=self.group)
            received.append(buffer.numpy())
        return received

    def from_lead(self, bits: Bytes) -> Bytes:
        """Rank 0's bytes on every rank; `bits` is the room for them on the others."""
        room = torch.from_numpy(bits)
        if room.numel():
            dist.broadcast(room, src=dist.get_global_rank(self.group, 0), group=self.group)
        return bits


class ShardedBits:
    """The published bits of this rank's shards. A PublishedBits on rank 0, a helper elsewhere."""

    def __init__(self, named: list[tuple[str, torch.Tensor]], *, master: str, ranks: Ranks) -> None:
        self._ranks = ranks
        self.layout, self.tied = _layout_of(named, master)
        self._parts = {
            name: part_here(tensor, rank=ranks.rank)
            for name, tensor in named
            if name in self.layout
        }
        self._local = Layout(
            TensorSpec(name=name, shape=[part.numel], dtype=self.layout[name].dtype)
            for name, part in self._parts.items()
        )
        self._shadow = Shadow.of(self._mine(named), self._local)
        self._all_parts = self._exchange_parts()
        self._digest = Digest()
        self.outcome = _NOTHING
        """Of the version before: what the other ranks have yet to be told."""

    def gathered(self) -> dict[str, BitArray]:
        """Collective. Every tensor's published bits on rank 0, and nothing on the others."""
        whole: dict[str, BitArray] = {}
        local = dict(self._shadow.named_bits())
        for name, tensor in self.layout.items():
            received = self._ranks.to_lead(local[name].view(np.uint8))
            if not received:
                continue
            bits = np.zeros(tensor.numel, tensor.bits)
            for part, mine in zip(self._all_parts[name], received, strict=True):
                bits.reshape(part.shape)[part.box] = mine.view(tensor.bits).reshape(part.sides)
            whole[name] = bits
        return whole

    def load(self, whole: Mapping[str, BitArray]) -> None:
        """Collective. Replace the published bits of all ranks by rank 0's whole tensors."""
        local: dict[str, BitArray] = {}
        for name, tensor in self.layout.items():
            bits = whole[name] if self._ranks.leads else np.empty(tensor.numel, tensor.bits)
            self._ranks.from_lead(bits.view(np.uint8))
            part = self._parts[name]
            local[name] = bits.reshape(part.shape)[part.box].flatten()
        self._shadow = Shadow(self._local, local)

    def diff(self, named_tensors: NamedTensors) -> list[SparsePatch]:
        """Collective. This rank's changes; on rank 0 those of all ranks, merged."""
        patches = {patch.name: patch for patch in self._shadow.diff(self._mine(named_tensors))}
        counts, positions, values, old = [], [], [], []
        for name, part in self._parts.items():
            patch = patches.get(name)
            counts.append(patch.changed if patch else 0)
            if patch is not None:
                assert patch.old is not None  # a diff always records it
                positions.append(part.positions(patch.indices).view(np.uint8))
                values.append(patch.values.view(np.uint8))
                old.append(patch.old.view(np.uint8))
        mine = np.concatenate(
            [np.array(counts, np.int64).view(np.uint8), *positions, *values, *old]
        )
        received = self._ranks.to_lead(mine)
        return self._merged([_Received(data, self.layout) for data in received])

    def commit(self) -> None:
        """This rank's pending diff is published."""
        self._shadow.commit()
        self.outcome = _COMMITTED

    def rollback(self) -> None:
        """This rank's pending diff is not published."""
        self._shadow.rollback()
        self.outcome = _ROLLED_BACK

    def before(self, patches: Sequence[SparsePatch]) -> OldValues | None:
        """No rank holds the whole base."""
        return None

    def digest(self) -> Digest:
        """As found when the run was entered (rank 0)."""
        return self._digest

    def entered_with(self, digest: Digest) -> None:
        """Note the digest of what is published (rank 0)."""
        self._digest = digest

    def snapshot(self) -> None:
        """No rank holds all tensors; see `gathered`."""
        return

    def _mine(self, named: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            if name in self.layout:
                yield name, local_of(tensor, self._parts[name])

    def _merged(self, ranks: list["_Received"]) -> list[SparsePatch]:
        """One patch a tensor, positions of all ranks sorted; ranks never hold the same element."""
        patches = []
        for name, tensor in self.layout.items():
            positions = np.concatenate([rank.positions[name] for rank in ranks] or [_NO_POSITIONS])
            if positions.size == 0:
                continue
            order = np.argsort(positions, kind="stable")
            patches.append(
                SparsePatch(
                    name=name,
                    indices=positions[order].astype(tensor.index_type),
                    values=np.concatenate([rank.values[name] for rank in ranks])[order],
                    old=np.concatenate([rank.old[name] for rank in ranks])[order],
                )
            )
        return patches

    def _exchange_parts(self) -> dict[str, list[Part]]:
        """Where every rank's shards lie, on rank 0."""
        mine = [n for part in self._parts.values() for n in (*part.begin, *part.end)]
        received = self._ranks.to_lead(np.array(mine, np.int64).view(np.uint8))
        rows = [iter(data.view(np.int64).tolist()) for data in received]
        return {
            name: [
                Part(
                    shape=part.shape,
                    begin=tuple(next(row) for _ in part.begin),
                    end=tuple(next(row) for _ in part.end),
                )
                for row in rows
            ]
            for name, part in self._parts.items()
        }


class _Received:
    """One rank's changes by tensor, as `ShardedBits.diff` packs them."""

    def __init__(self, data: Bytes, layout: Layout) -> None:
        counts = data[: 8 * len(layout)].view(np.int64).tolist()
        sizes = dict(zip(layout, counts, strict=True))
        at = 8 * len(layout)

        def take(width_of: Callable[[str], np.dtype[np.generic]]) -> dict[str, BitArray]:
            nonlocal at
            found: dict[str, BitArray] = {}
            for name, count in sizes.items():
                width = width_of(name)
                end = at + count * width.itemsize
                # A copy: pieces of a byte stream are not aligned.
                found[name] = np.frombuffer(data[at:end].tobytes(), width)
                at = end
            return found

        self.positions: Mapping[str, IndexArray] = take(lambda _: np.dtype(np.int64))  # type: ignore[assignment]
        self.values = take(lambda name: layout[name].bits)
        self.old = take(lambda name: layout[name].bits)


_NO_POSITIONS = np.empty(0, np.int64)


class ShardedPublisher(LoopPublisher):
    """One on every rank; rank 0's talks to the store."""

    def __init__(
        self,
        model: torch.nn.Module,
        bits: ShardedBits,
        ranks: Ranks,
        publisher: Publisher | None,
    ) -> None:
        super().__init__()
        self._model, self._bits, self._ranks = model, bits, ranks
        self.publisher = publisher
        self._commits = Commits(publisher) if publisher is not None else None

    def step(self) -> None:
        """See LoopPublisher. Collective."""
        self._agree()
        named = named_weights(self._model)
        if self.publisher is None or self._commits is None:
            self._bits.diff(named)
        else:
            self._commits.start(self.publisher.diff(named))

    def wait(self) -> PolicyVersion:
        """See LoopPublisher. Collective; the version on every rank."""
        return self._agree()

    def finish(self) -> None:
        """See LoopPublisher. Collective."""
        self._agree()
        whole = self._bits.gathered()
        if self.publisher is not None:
            self.publisher.finish(whole)

    def close(self) -> None:
        """See LoopPublisher. Not collective."""
        super().close()
        if self._commits is not None:
            self._commits.close()
        if self.publisher is not None:
            self.publisher.close()

    def _agree(self) -> PolicyVersion:
        """Wait for the version before, tell all ranks what became of it, write an anchor if due."""
        failure: DeltawireError | None = None
        told = [_NOTHING, 0, 0]
        if self.publisher is not None and self._commits is not None:
            try:
                self._commits.settled()
                self.publisher.settled()
                told = [self._bits.outcome, self.publisher.anchor_due, self.publisher.version]
            except DeltawireError as error:
                failure, told = error, [_FAILED, 0, 0]
        outcome, anchor_due, version = self._ranks.agreed([int(number) for number in told])
        if failure is not None:
            raise failure
        self._apply(outcome)
        if anchor_due:
            whole = self._bits.gathered()
            if self.publisher is not None:
                self.publisher.start_anchor(whole)
        return PolicyVersion(version)

    def _apply(self, outcome: int) -> None:
        if outcome == _FAILED:
            raise StoreError("rank 0 cannot publish; its log says why")
        if not self._ranks.leads:
            if outcome == _COMMITTED:
                self._bits.commit()
            elif outcome == _ROLLED_BACK:
                self._bits.rollback()
        self._bits.outcome = _NOTHING


def open_sharded(
    model: torch.nn.Module,
    *,
    store: Store,
    master_dtype: str,
    options: PublishOptions,
    enter: EnterRun,
) -> ShardedPublisher:
    """Collective. Rank 0 enters the run; a restored run's bits are handed to all ranks."""
    ranks = Ranks()
    bits = ShardedBits(named_weights(model), master=master_dtype, ranks=ranks)
    whole = bits.gathered()
    entered, failure, status = None, None, _NOTHING
    if ranks.leads:
        given = WholeBits(bits.layout, whole)
        try:
            entered = enter(given, bits.tied)
            status = _COMMITTED if entered.bits is given else _ROLLED_BACK
        except DeltawireError as error:
            failure, status = error, _FAILED
    (status,) = ranks.agreed([status])
    if failure is not None:
        raise failure
    if status == _FAILED:
        raise StoreError("rank 0 could not open the run; its log says why")
    if status == _ROLLED_BACK:
        bits.load(dict(entered.bits.named_bits()) if entered is not None else {})
    if entered is None:
        return ShardedPublisher(model, bits, ranks, None)
    bits.entered_with(entered.bits.digest())
    publisher = Publisher(
        store, entered.ledger, bits, options=options, owner_file=entered.owner_file
    )
    return ShardedPublisher(model, bits, ranks, publisher)


def _layout_of(
    named: Sequence[tuple[str, torch.Tensor]], master: str
) -> tuple[Layout, dict[str, str]]:
    """The layout of the whole tensors, and tied names. Shards share no storage with their whole,
    so a tie is one parameter under two names."""
    specs: list[TensorSpec] = []
    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in named:
        if id(tensor) in first_name:
            tied[name] = first_name[id(tensor)]
            continue
        first_name[id(tensor)] = name
        word = word_of(tensor.dtype)
        dtype = master if word == "F32" else word
        specs.append(TensorSpec(name=name, shape=list(tensor.shape), dtype=dtype))
    return Layout(specs), tied
