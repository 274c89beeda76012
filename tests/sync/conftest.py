"""A tiny model, a folder as bucket, a store that fails on command, and a replica in a few lines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from deltawire.codec.apply import LiveTensors
from deltawire.codec.digest import Digest
from deltawire.protocol.errors import StoreUnavailable
from deltawire.store.base import ObjectInfo, Store, StoreBudget
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher
from deltawire.sync.replay import empty_tensors, replay


@dataclass
class FaultyStore:
    """The store below, with a record of writes and failures on command.

    `before` and `after` map a call ("put deltas/", "swap") to how many more times it fails, with
    the write not done or done.
    """

    inner: Store
    events: list[str] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return self.inner.uri

    def put(self, key: str, source: Path) -> ObjectInfo:
        return self._writing(f"put {key}", lambda: self.inner.put(key, source))

    def swap(self, key: str, body: bytes, *, expect: str | None) -> ObjectInfo:
        return self._writing(f"swap {key}", lambda: self.inner.swap(key, body, expect=expect))

    def fetch(
        self, key: str, target: Path, *, size_bytes: int | None = None, xet_hash: str | None = None
    ) -> ObjectInfo:
        self.events.append(f"fetch {key}")
        return self.inner.fetch(key, target, size_bytes=size_bytes, xet_hash=xet_hash)

    def read(self, key: str, *, max_bytes: int = 16 * 2**20) -> tuple[bytes, ObjectInfo]:
        self._fail(self.before, f"read {key}")
        return self.inner.read(key, max_bytes=max_bytes)

    def stat(self, key: str) -> ObjectInfo | None:
        return self.inner.stat(key)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)

    def budget(self) -> StoreBudget:
        return self.inner.budget()

    def close(self) -> None:
        self.inner.close()

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self.inner.list(prefix)

    def _writing(self, act: str, call: Callable[[], ObjectInfo]) -> ObjectInfo:
        self._fail(self.before, act)
        info = call()
        self.events.append(act)
        self._fail(self.after, act)
        return info

    def _fail(self, plan: dict[str, int], act: str) -> None:
        for wanted, times in plan.items():
            if times and wanted in act:
                plan[wanted] = times - 1
                raise StoreUnavailable(f"{act}: the network is down")


class Trainer:
    """fp32 masters that move a little at each step."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.tensors = {
            "embed.weight": torch.randn(128, 64, generator=self.random),
            "norm.weight": torch.ones(16),
            "odd": torch.randn(3, 5, 7, generator=self.random),
        }

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.tensors.items())

    def step(self, size: float = 3e-5) -> None:
        for tensor in self.tensors.values():
            tensor += size * torch.randn(tensor.shape, generator=self.random)


class Replica:
    """Holds weights, follows a run by routes, checks every digest on the way."""

    def __init__(self, store: Store, run_id: str, cache_dir: Path) -> None:
        self.follower = Follower(store, run_id, cache_dir)
        self.version: int | None = None
        self.digest: Digest | None = None
        self._tensors: LiveTensors | None = None

    @property
    def tensors(self) -> LiveTensors:
        if self._tensors is None:
            self._tensors = empty_tensors(self.follower.layout())
        return self._tensors

    def catch_up(self) -> int:
        head = self.follower.head()
        if self.version != head.version:
            objects = self.follower.fetch(self.follower.route(self.version, head.version))
            self.digest = replay(
                objects, self.tensors, run_id=self.follower.run_id, digest=self.digest
            )
            self.version = head.version
        assert str(self.digest) == head.link_digest(head.version)
        return head.version

    def bits(self) -> dict[str, list[int]]:
        return {name: bits.tolist() for name, bits in self.tensors.named_bits()}


def published_bits(trainer: Trainer) -> dict[str, list[int]]:
    """What a replica must hold, by torch's own cast."""
    return {
        name: tensor.to(torch.bfloat16).reshape(-1).view(torch.int16).numpy().view("u2").tolist()
        for name, tensor in trainer.named()
    }


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def other_trainer() -> Trainer:
    return Trainer(seed=1)


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(LocalStore(tmp_path / "bucket"))


@pytest.fixture
def replica(store: FaultyStore, tmp_path: Path) -> Replica:
    return Replica(store, "run", tmp_path / "cache")


@pytest.fixture
def new_replica(store: FaultyStore, tmp_path: Path) -> Callable[[], Replica]:
    made: list[Replica] = []

    def make() -> Replica:
        made.append(Replica(store, "run", tmp_path / f"cache_{len(made)}"))
        return made[-1]

    return make


OpenPublisher = Callable[..., Publisher]


@pytest.fixture
def open_publisher(store: FaultyStore, tmp_path: Path) -> Iterator[OpenPublisher]:
    """Opens publishers of run "run" as the trainer whose owner file is `owner`; closes them all."""
    opened: list[Publisher] = []

    def open_one(trainer: Trainer, *, owner: str = "owner", **options: object) -> Publisher:
        publisher = Publisher.open(
            store,
            run_id="run",
            named_tensors=trainer.named(),
            owner_file=tmp_path / owner,
            **options,  # type: ignore[arg-type]
        )
        opened.append(publisher)
        return publisher

    yield open_one
    for publisher in opened:
        publisher.close()


@pytest.fixture
def expected_bits() -> Callable[[Trainer], dict[str, list[int]]]:
    return published_bits
