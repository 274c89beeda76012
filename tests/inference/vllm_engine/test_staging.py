"""Staging against two ranks' live weights, without vLLM: the workers are called directly."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from deltawire.codec.digest import Digest
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import (
    DeltawireError,
    DigestMismatch,
    EngineError,
    MalformedObject,
)
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.options import ANCHOR_SHARD_BYTES
from deltawire.sync.publisher import Publisher
from deltawire_inference.engines.vllm.checkpoint import write_checkpoint
from deltawire_inference.engines.vllm.child import VllmChild
from deltawire_inference.engines.vllm.client import SwapAnswer
from deltawire_inference.engines.vllm.engine import VllmEngine, _Running
from deltawire_inference.engines.vllm.options import VllmOptions
from deltawire_inference.engines.vllm.remote_weights import RankMap
from deltawire_inference.engines.vllm.staging import Stager
from deltawire_inference.vllm_plugin.checkpoint_files import read_tensors
from deltawire_inference.vllm_plugin.checkpoint_map import TensorSpec, UnmappableName
from deltawire_inference.vllm_plugin.receiver import Receiver
from deltawire_inference.vllm_plugin.swap_route import SwapOrder
from deltawire_inference.vllm_plugin.trace import learn_map

RANKS = 2
SHAPES = {"embed": (90, 96), "rows": (64, 96), "columns": (96, 64), "norm": (96,), "odd": (4,)}


class HalfModel(torch.nn.Module):
    """One rank of two: half the rows, half the columns, a whole norm, and one odd loader."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        for name, shape in {"embed": (45, 96), "rows": (32, 96), "columns": (96, 32)}.items():
            self.register_parameter(name, frozen(*shape))
        self.norm = frozen(96)
        self.odd = frozen(4)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            if name == "odd":
                self.odd.data.copy_(w.float() * 2)
            elif name == "norm":
                self.norm.data.copy_(w)
            else:
                mine = getattr(self, name)
                dim = 1 if name == "columns" else 0
                size = mine.shape[dim]
                mine.data.copy_(w.narrow(dim, self.rank * size, size))


def frozen(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)


class DirectCalls:
    """The worker calls of two ranks in this process; notes what was called."""

    def __init__(self, receivers: list[Receiver], folder: Path) -> None:
        self.receivers, self.folder, self.ranks = receivers, folder, len(receivers)
        self.events: list[str] = []

    def call(self, method: str, *args: object) -> list[dict[str, object]]:
        self.events.append(method)
        assert method == "deltawire_discard"
        for receiver in self.receivers:
            receiver.discard(str(args[0]))
        return []

    def run_job(self, method: str, *args: object) -> None:
        self.events.append(method)
        act = method.removeprefix("deltawire_start_")
        for rank, receiver in enumerate(self.receivers):
            own = [a.replace("{rank}", str(rank)) if isinstance(a, str) else a for a in args]
            paths = [Path(a) if isinstance(a, str) and "/" in a else a for a in own]
            getattr(receiver, act)(*paths)

    def paths(self, pattern: str) -> list[Path]:
        return [Path(pattern.replace("{rank}", str(rank))) for rank in range(self.ranks)]


class World:
    """A trainer that publishes, and two live ranks that follow through the stager."""

    def __init__(
        self,
        folder: Path,
        encoding: str,
        shapes: dict[str, tuple[int, ...]],
        anchor_shard_bytes: int = ANCHOR_SHARD_BYTES,
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.weights = {n: torch.randn(s, generator=self.random) for n, s in shapes.items()}
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.store = LocalStore(folder / "bucket")
        self.publisher = Publisher.open(
            self.store,
            run_id="run",
            named_tensors=self.weights.items(),
            model_files={"config.json": folder / "model" / "config.json"},
            owner_file=folder / "owner",
            encoding=encoding,
            anchor_every=100,
            anchor_shard_bytes=anchor_shard_bytes,
            keep_versions=50,
        )
        self.follower = Follower(self.store, "run", folder / "cache")
        self.version, self.digest = 0, Digest.parse(self.publisher.digest)
        self.models = [HalfModel(rank) for rank in range(RANKS)]
        self.base = folder / "base"
        manifest = self.follower.manifest()
        objects = self.fetch(None)
        write_checkpoint(self.follower.model_dir(), objects, manifest=manifest, target=self.base)
        specs = [TensorSpec(name=n, shape=s, dtype=torch.bfloat16) for n, s in shapes.items()]
        receivers = []
        for model in self.models:
            model.load_weights(read_tensors(self.base))
            receivers.append(Receiver(model))
            receivers[-1].adopt(learn_map(model, specs))
        memory = folder / "memory"
        memory.mkdir()
        self.calls = DirectCalls(receivers, memory)
        maps = [RankMap(where=r.map, fingerprint=r.fingerprint) for r in receivers]
        self.stager = Stager(self.calls, maps, manifest=manifest, model_dir=self.base, disk=folder)

    def step(self, *, share: float = 0.05) -> None:
        for name, w in self.weights.items():
            if name != "odd":
                moved = torch.rand(w.shape, generator=self.random) < share
                w += moved * torch.randn(w.shape, generator=self.random)
        self.publisher.publish(self.weights.items())

    def fetch(self, have: int | None) -> list[tuple[Link, Path]]:
        head = self.follower.head()
        return self.follower.fetch(self.follower.route(have, head.version))

    def follow(self, objects: list[tuple[Link, Path]] | None = None) -> None:
        staged = self.stager.stage(objects or self.fetch(self.version), held=self.digest)
        for receiver in self.calls.receivers:
            receiver.apply(staged.token.key)
        self.version, self.digest = staged.version, Digest.parse(staged.new_digest)

    def expected(self) -> list[dict[str, list[int]]]:
        """What each rank would hold had it loaded the published weights."""
        fresh = [HalfModel(rank) for rank in range(RANKS)]
        for model in fresh:
            model.load_weights((n, w.bfloat16()) for n, w in self.weights.items())
        return [bits_of_model(model) for model in fresh]

    def held(self) -> list[dict[str, list[int]]]:
        return [bits_of_model(model) for model in self.models]


def bits_of_model(model: torch.nn.Module) -> dict[str, list[int]]:
    return {n: p.data.view(torch.int16).flatten().tolist() for n, p in model.named_parameters()}


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    made: list[World] = []

    def make(encoding: str, shapes: dict[str, tuple[int, ...]] = SHAPES, **options: int) -> World:
        made.append(World(tmp_path, encoding, shapes, **options))
        return made[-1]

    yield make
    for world in made:
        world.publisher.close()


MAPPABLE = {name: shape for name, shape in SHAPES.items() if name != "odd"}


@pytest.mark.parametrize("encoding", ["seed", "compact", "classes"])
def test_two_ranks_follow_every_encoding_one_delta_at_a_time(
    make_world: MakeWorld, encoding: str
) -> None:
    world = make_world(encoding, MAPPABLE)
    for _ in range(5):
        world.step()
        world.follow()

        assert world.held() == world.expected()
        assert str(world.digest) == world.publisher.digest


def test_several_deltas_enter_as_one_update(make_world: MakeWorld) -> None:
    world = make_world("compact")
    for _ in range(4):
        world.step()

    world.follow()

    assert world.held() == world.expected()
    assert world.calls.events.count("deltawire_start_stage") == 1


@pytest.mark.parametrize("anchor_shard_bytes", [ANCHOR_SHARD_BYTES, 15_000])
@pytest.mark.parametrize("share", [0.05, 0.9])
def test_an_anchor_in_one_file_or_in_shards_enters_as_a_difference_or_as_a_copy(
    make_world: MakeWorld, share: float, anchor_shard_bytes: int
) -> None:
    world = make_world("compact", MAPPABLE, anchor_shard_bytes=anchor_shard_bytes)
    world.step(share=share)
    world.publisher.finish()
    head = world.follower.head()
    anchor = next(x for x in head.links if x.kind == "anchor" and x.version == head.version)
    assert len(anchor.shards) == (0 if anchor_shard_bytes == ANCHOR_SHARD_BYTES else 3)

    world.follow(world.follower.fetch([anchor]))

    assert world.held() == world.expected()
    assert str(world.digest) == world.publisher.digest
    assert str(world.stager.recomputed()) == world.publisher.digest


def test_what_touches_an_opaque_tensor_is_refused_and_nothing_is_held(
    make_world: MakeWorld,
) -> None:
    world = make_world("compact")
    before = world.held()
    world.weights["odd"][1] += 1
    world.step()

    with pytest.raises(UnmappableName, match="odd"):
        world.follow()

    assert world.held() == before
    assert list(world.calls.folder.iterdir()) == []
    world.step()  # the next one alone would do no harm, but it stands on the refused one
    with pytest.raises(UnmappableName, match="odd"):
        world.follow()


def test_a_delta_for_other_weights_is_refused_before_any_write(make_world: MakeWorld) -> None:
    world = make_world("seed", MAPPABLE)
    world.step()
    before, true_digest = world.held(), world.digest
    world.digest = Digest(1, 2)

    with pytest.raises(DigestMismatch):
        world.follow()

    assert world.held() == before
    world.digest = true_digest
    world.follow()
    assert world.held() == world.expected()


@pytest.mark.parametrize("have", [0, None])
async def test_an_update_that_the_workers_refuse_is_held_by_nobody(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, have: int | None
) -> None:
    async def refuse(order: SwapOrder) -> SwapAnswer:
        return SwapAnswer(results=[{"refused": "the weights moved"}] * RANKS, pause_s=0.0)

    world = make_world("compact", MAPPABLE)
    world.step()
    engine = VllmEngine(VllmOptions(state_dir=tmp_path / "state"))
    monkeypatch.setattr(VllmChild, "alive", True)
    engine._running = _Running(
        client=None,
        swap=refuse,
        calls=world.calls,
        stager=world.stager,
        adapters=None,
        policy=None,
        version=PolicyVersion(0),
        digest=world.digest,
    )
    staged = await engine.stage(world.fetch(have))
    assert any(receiver._patches for receiver in world.calls.receivers)
    with pytest.raises(EngineError, match="was not applied: the weights moved"):
        await engine.apply(staged, mode="keep")
    assert engine.version == 0
    assert not any(receiver._patches for receiver in world.calls.receivers)
    assert "merged" not in " ".join(os.listdir(tmp_path))


def test_a_memory_fault_is_seen_when_the_digest_is_recomputed(make_world: MakeWorld) -> None:
    world = make_world("seed", MAPPABLE)
    assert str(world.stager.recomputed()) == world.publisher.digest

    world.models[1].columns.data[3, 5] += 1

    assert str(world.stager.recomputed()) != world.publisher.digest


def test_a_damaged_file_is_refused_and_the_next_update_goes_in(make_world: MakeWorld) -> None:
    world = make_world("compact")
    world.step()
    (link, path), *_ = world.fetch(0)
    damaged = path.with_name("damaged.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x55
    damaged.write_bytes(content)

    with pytest.raises(DeltawireError):
        world.follow([(link, damaged)])
    with pytest.raises(MalformedObject):
        world.calls.receivers[0].apply("never staged")
    world.follow()

    assert world.held() == world.expected()
