"""LoRA runs through a bucket: the base once, then adapters or deltas of them, bit for bit."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from deltawire.codec.bits import bits_of, tensor_of
from deltawire.protocol.adapters import AdapterManifest, adapter_key, adapter_part
from deltawire.protocol.chain import Head, Link
from deltawire.protocol.errors import Fenced, LayoutMismatch, StoreUnavailable
from deltawire.protocol.layout import ObjectKind, in_run, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire.sync.adapters import goes_whole, merged
from deltawire.sync.audit import audit
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher
from deltawire.sync.retention import plan_links

ADAPTER = AdapterManifest(rank=2, alpha=8.0, targets=["q_proj"])
MODULE = "layers.0.q_proj"
A, B = adapter_key(MODULE, "A"), adapter_key(MODULE, "B")


class LoraTrainer:
    """A frozen bf16 base and fp32 masters of one adapted layer."""

    def __init__(self, seed: int = 0, rank: int = 2) -> None:
        self.random = torch.Generator().manual_seed(seed)
        base = {
            "embed.weight": torch.randn(512, 64, generator=self.random),
            f"{MODULE}.weight": torch.randn(128, 64, generator=self.random),
        }
        self.tensors = {name: tensor.bfloat16() for name, tensor in base.items()} | {
            A: torch.randn(rank, 64, generator=self.random),
            B: torch.zeros(128, rank),
        }

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.tensors.items())

    def adapter(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, self.tensors[name]) for name in (A, B)]

    def step(self, size: float = 1e-3) -> None:
        for _, tensor in self.adapter():
            tensor += size * torch.randn(tensor.shape, generator=self.random)

    def bits(self) -> dict[str, list[int]]:
        return {n: bits_of(t.bfloat16()).tolist() for n, t in self.tensors.items()}


OpenLora = Callable[..., Publisher]


@pytest.fixture
def open_lora(store: object, tmp_path: Path) -> Iterator[OpenLora]:
    opened: list[Publisher] = []

    def open_one(trainer: LoraTrainer, *, owner: str = "owner", **options: object) -> Publisher:
        opened.append(
            Publisher.open(
                store,  # type: ignore[arg-type]
                run_id="run",
                named_tensors=trainer.named(),
                owner_file=tmp_path / owner,
                **{"adapter": ADAPTER, **options},  # type: ignore[arg-type]
            )
        )
        return opened[-1]

    yield open_one
    for publisher in opened:
        publisher.close()


@pytest.fixture
def lora() -> LoraTrainer:
    return LoraTrainer()


def test_every_version_arrives_bit_for_bit_and_the_base_travels_once(
    open_lora: OpenLora, lora: LoraTrainer, replica, new_replica, store
) -> None:
    publisher = open_lora(lora)
    replica.catch_up()
    for step in range(12):
        lora.step(size=1e-1 if step % 3 else 1e-6)
        published = publisher.publish(lora.adapter())
        assert replica.catch_up() == published.link.version
        assert replica.bits() == lora.bits()
        assert published.link.bytes < 0.1 * published.record.full_bytes
        joiner = new_replica()
        joiner.catch_up()
        assert joiner.bits() == lora.bits()
        assert str(joiner.digest) == publisher.digest
    kinds = {link.kind for link in publisher.head.links}
    assert kinds == {ObjectKind.ANCHOR, ObjectKind.ADAPTER, ObjectKind.DELTA}
    assert [e for e in store.events if e.startswith("put run/anchors/")] == [
        "put run/anchors/step_000000.safetensors"
    ]
    assert all(not verdict.problem for verdict in audit(replica.follower))


def test_a_laggard_and_a_joiner_need_only_the_newest_adapter(
    open_lora: OpenLora, lora: LoraTrainer, replica
) -> None:
    publisher = open_lora(lora)
    replica.catch_up()
    for _ in range(6):
        lora.step(size=1.0)
        publisher.publish(lora.adapter())
    route = replica.follower.route(0, replica.follower.head().version)
    assert [(link.kind, link.version) for link in route] == [(ObjectKind.ADAPTER, 6)]
    joining = replica.follower.route(None, 6)
    assert [(link.kind, link.version) for link in joining] == [
        (ObjectKind.ANCHOR, 0),
        (ObjectKind.ADAPTER, 6),
    ]
    replica.catch_up()
    assert replica.bits() == lora.bits()


def test_a_finished_run_ends_with_a_whole_adapter_that_peft_can_read(
    open_lora: OpenLora, lora: LoraTrainer, replica
) -> None:
    publisher = open_lora(lora)
    for size in (1.0, 1e-6):
        lora.step(size)
        last = publisher.publish(lora.adapter()).link
    assert last.kind is ObjectKind.DELTA
    head = publisher.finish()
    (whole,) = [k for k in head.links if k.version == 2 and k.kind is ObjectKind.ADAPTER]
    replica.follower.head()
    ((_, path),) = replica.follower.fetch([whole])
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {A, B}
        assert torch.equal(file.get_tensor(A), lora.tensors[A].bfloat16())
        config = json.loads(file.metadata()["adapter_config"])
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8.0, ["q_proj"])
    assert publisher.finish().links == head.links
    assert all(not verdict.problem for verdict in audit(replica.follower))


def test_a_failed_version_is_in_the_next_one(
    open_lora: OpenLora, lora: LoraTrainer, replica, store
) -> None:
    publisher = open_lora(lora)
    lora.step(1.0)
    store.before["put run/adapters/"] = 1
    with pytest.raises(StoreUnavailable):
        publisher.publish(lora.adapter())
    assert publisher.version == 0
    lora.step(1e-6)
    assert publisher.publish(lora.adapter()).link.version == 1
    replica.catch_up()
    assert replica.bits() == lora.bits()


def test_a_restarted_trainer_and_one_that_takes_over_go_on_from_what_was_published(
    open_lora: OpenLora, lora: LoraTrainer, replica
) -> None:
    first = open_lora(lora)
    lora.step(1.0)
    first.publish(lora.adapter())
    digest = first.digest
    first.close()

    late = LoraTrainer()
    second = open_lora(late)
    assert (second.version, second.digest) == (1, digest)
    pending = second.diff(late.adapter())
    assert pending.changed
    second.discard(pending)
    with pytest.raises(Fenced):
        open_lora(late, owner="other")
    second.close()

    third = open_lora(late, owner="other", take_over=True)
    late.step(1.0)
    third.publish(late.adapter())
    replica.catch_up()
    assert replica.bits() == late.bits()


@pytest.mark.parametrize(
    ("other", "adapter"),
    [
        (LoraTrainer(seed=1), ADAPTER),
        (LoraTrainer(rank=3), ADAPTER.model_copy(update={"rank": 3})),
        (LoraTrainer(), ADAPTER.model_copy(update={"alpha": 9.0})),
        (LoraTrainer(), None),
    ],
    ids=["another base", "another rank", "another scale", "no adapter"],
)
def test_another_base_rank_or_scale_is_refused_before_the_run_is_claimed(
    open_lora: OpenLora, lora: LoraTrainer, other: LoraTrainer, adapter: AdapterManifest | None
) -> None:
    first = open_lora(lora)
    with pytest.raises(LayoutMismatch):
        open_lora(other, owner="other", adapter=adapter, take_over=True)
    lora.step()
    assert first.publish(lora.adapter()).link.version == 1


def test_an_adapter_whose_bits_were_changed_is_found_and_never_applied(
    open_lora: OpenLora, lora: LoraTrainer, replica, store, tmp_path: Path
) -> None:
    publisher = open_lora(lora)
    lora.step(1.0)
    link = publisher.publish(lora.adapter()).link
    path = tmp_path / "bucket" / "run" / link.key
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    (verdict,) = [v for v in audit(replica.follower) if v.problem]
    assert verdict.link.key == link.key
    assert "ChecksumMismatch" in verdict.problem


def test_a_chain_whose_objects_are_lost_goes_on_with_a_new_anchor(
    open_lora: OpenLora, lora: LoraTrainer, replica, store
) -> None:
    first = open_lora(lora)
    lora.step(1.0)
    link = first.publish(lora.adapter()).link
    first.close()
    store.delete([in_run("run", link.key)])
    late = LoraTrainer()
    second = open_lora(late)
    assert second.version == 2
    late.step(1.0)
    second.publish(late.adapter())
    replica.catch_up()
    assert replica.bits() == late.bits()


def test_a_tampered_scale_or_shape_in_the_manifest_is_refused(
    open_lora: OpenLora, lora: LoraTrainer, store, tmp_path: Path
) -> None:
    open_lora(lora)
    path = tmp_path / "bucket" / "run" / "run.json"
    said = json.loads(path.read_text())
    said["adapter"]["rank"] = 4
    path.write_text(json.dumps(said))
    with pytest.raises(LayoutMismatch, match="rank 4"):
        Follower(store, "run", tmp_path / "c").manifest()


def _link(kind: ObjectKind, version: int, size: int = 10) -> Link:
    base = PolicyVersion(version - 1) if kind is ObjectKind.DELTA else None
    return Link(
        version=PolicyVersion(version),
        kind=kind,
        key=object_key(kind, version),
        base_version=base,
        bytes=size,
        sha256="0" * 64,
        new_digest="",
    )


@pytest.mark.parametrize(
    ("sizes", "delta_bytes", "whole"),
    [([], 100, True), ([], 99, False), ([60], 39, False), ([60], 40, True)],
)
def test_deltas_since_the_last_whole_adapter_never_outweigh_one(
    sizes: list[int], delta_bytes: int, whole: bool
) -> None:
    deltas = [_link(ObjectKind.DELTA, 4 + i, size) for i, size in enumerate(sizes)]
    links = [_link(ObjectKind.ANCHOR, 0, 10**6), _link(ObjectKind.DELTA, 1, 500)]
    links += [_link(ObjectKind.ADAPTER, 3, 100), *deltas]
    assert goes_whole(links, delta_bytes=delta_bytes, adapter_bytes=100) is whole


def test_retention_keeps_the_base_and_the_adapter_that_the_oldest_replica_needs() -> None:
    links = [_link(ObjectKind.ANCHOR, 0), *(_link(ObjectKind.ADAPTER, v) for v in range(1, 10))]
    head = Head(run_id="run", version=PolicyVersion(9), links=links)
    plan = plan_links(head, keep_versions=3)
    assert [link.version for link in plan.keep] == [0, 6, 7, 8, 9]


def test_a_long_run_names_few_objects(open_lora: OpenLora, lora: LoraTrainer, replica) -> None:
    publisher = open_lora(lora, keep_versions=3)
    longest = 0
    for _ in range(20):
        lora.step(1.0)
        publisher.publish(lora.adapter())
        longest = max(longest, len(publisher.head.links))
    assert longest <= 9
    replica.catch_up()
    assert replica.bits() == lora.bits()


def test_merging_adds_the_scaled_product_and_nothing_else(lora: LoraTrainer) -> None:
    from deltawire.codec.patch import Layout

    lora.step(1.0)
    layout, _ = Layout.of_tensors(lora.named())
    bits = {name: bits_of(tensor.bfloat16()) for name, tensor in lora.tensors.items()}
    whole = dict(merged(bits, layout, ADAPTER))
    assert [adapter_part(name) for name in whole] == [None, None]
    assert torch.equal(whole["embed.weight"], lora.tensors["embed.weight"])
    held = {n: tensor_of(bits[n], "BF16", layout[n].shape).float() for n in bits}
    expected = held[f"{MODULE}.weight"] + 4.0 * held[B] @ held[A]
    assert torch.equal(whole[f"{MODULE}.weight"], expected.bfloat16())
