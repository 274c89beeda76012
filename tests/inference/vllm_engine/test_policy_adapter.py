"""Versions of a LoRA run in a vLLM child: loaded ahead, asked for by name, unloaded last."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from deltawire.codec.adapter import base_layout
from deltawire.codec.digest import Digest, digest_part, digest_tensors
from deltawire.codec.patch import Layout
from deltawire.protocol.adapters import AdapterManifest, adapter_key
from deltawire.protocol.chain import RunManifest
from deltawire.protocol.errors import DigestMismatch, EngineError
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Fetched, Follower
from deltawire.sync.publisher import Publisher
from deltawire_inference.engines.vllm.checkpoint import WEIGHTS, write_checkpoint
from deltawire_inference.engines.vllm.client import VllmClient
from deltawire_inference.engines.vllm.options import VllmOptions, serve_command
from deltawire_inference.engines.vllm.policy_adapter import PolicyAdapter, empty_adapter

ADAPTER = AdapterManifest(rank=2, alpha=4.0, targets=["q_proj"])
A, B = adapter_key("l.q_proj", "A"), adapter_key("l.q_proj", "B")


class Child:
    """Notes what it is told to load, and reads it as vLLM does: when it is told."""

    def __init__(self) -> None:
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.unloaded: list[str] = []
        self.refuses = self.refuses_to_unload = False

    async def load_adapter(self, name: str, path: Path) -> None:
        if self.refuses:
            raise EngineError("rank too high")
        assert json.loads((path / "adapter_config.json").read_text())["r"] == 2
        assert name not in self.adapters
        self.adapters[name] = load_file(path / "adapter_model.safetensors")

    async def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)
        if self.refuses_to_unload:
            raise EngineError("busy")


class Run:
    """A published LoRA run, and one replica's half of it."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {
            "l.q_proj.weight": torch.randn(64, 32).bfloat16(),
            A: torch.randn(2, 32),
            B: torch.zeros(64, 2),
        }
        store = LocalStore(folder / "bucket")
        self.publisher = Publisher.open(
            store, run_id="r", named_tensors=self.tensors.items(), adapter=ADAPTER
        )
        self.follower = Follower(store, "r", folder / "cache")
        self.child, self.folder = Child(), folder
        self.layout = Layout(self.manifest.tensors)
        self.adapter = empty_adapter(self.layout)
        self.digest = write_checkpoint(
            self.follower.model_dir(),
            self.route(None),
            manifest=self.manifest,
            target=folder / "checkpoint",
            adapter=self.adapter,
        )
        self.policy = PolicyAdapter(
            cast(VllmClient, self.child),
            self.adapter,
            manifest=self.manifest,
            adapter=ADAPTER,
            folder=folder,
        )

    @property
    def manifest(self) -> RunManifest:
        return self.follower.manifest()

    def route(self, have: int | None) -> Fetched:
        head = self.follower.head()
        return self.follower.fetch(self.follower.route(have, head.version))

    def move(self, size: float = 1.0) -> int:
        for name in (A, B):
            self.tensors[name] += size * torch.randn(self.tensors[name].shape)
        return int(self.publisher.publish(self.tensors.items()).link.version)

    async def follow(self, have: int) -> None:
        patches, digest = self.policy.read(self.route(have), held=self.digest)
        version = PolicyVersion(self.follower.head().version)
        staged = await self.policy.stage(patches, version=version, held=self.digest, digest=digest)
        await self.policy.enter(staged)
        self.digest = digest


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    torch.manual_seed(0)
    made = Run(tmp_path)
    yield made
    made.publisher.close()


async def test_every_version_is_what_was_published_and_the_base_alone_is_in_the_checkpoint(
    run: Run,
) -> None:
    await run.policy.load(PolicyVersion(0), run.digest)
    assert set(load_file(run.folder / "checkpoint" / WEIGHTS)) == {"l.q_proj.weight"}
    for have, size in enumerate((1.0, 1e-4, 1.0)):
        version = run.move(size)
        await run.follow(have)
        assert run.policy.name == f"policy-v{version}"
        for name, tensor in run.child.adapters[run.policy.name].items():
            assert torch.equal(tensor, run.tensors[name].bfloat16())
        assert str(run.digest) == run.publisher.digest
        own = run.policy.digest_part()
        base = [(n, t) for n, t in run.tensors.items() if n in base_layout(run.layout)]
        assert digest_tensors(base, base_layout(run.layout)).plus((own.a, own.b)) == run.digest
    assert run.policy.loaded == ("policy-v3",)
    assert run.child.unloaded == ["policy-v0", "policy-v1", "policy-v2"]
    assert not (run.folder / "adapter-policy-v1").exists()


async def test_an_adapter_stays_until_its_last_request_has_ended(run: Run) -> None:
    await run.policy.load(PolicyVersion(0), run.digest)
    async with run.policy.used("policy-v0"):
        async with run.policy.used("policy-v0"):
            run.move()
            await run.follow(0)
            assert run.policy.loaded == ("policy-v0", "policy-v1")
        assert run.child.unloaded == []
    assert run.child.unloaded == ["policy-v0"]
    async with run.policy.used("policy-v1"):
        pass
    assert run.policy.loaded == ("policy-v1",)


async def test_an_adapter_that_cannot_be_unloaded_only_takes_room(run: Run) -> None:
    run.child.refuses_to_unload = True
    await run.policy.load(PolicyVersion(0), run.digest)
    run.move()
    await run.follow(0)
    assert run.policy.name == "policy-v1"
    assert run.child.unloaded == ["policy-v0"]


async def test_a_version_that_is_refused_leaves_the_old_one_and_may_come_again(run: Run) -> None:
    await run.policy.load(PolicyVersion(0), run.digest)
    run.move()
    with pytest.raises(DigestMismatch):
        run.policy.read(run.route(0), held=Digest(1, 2))
    run.child.refuses = True
    with pytest.raises(EngineError, match="rank"):
        await run.follow(0)
    own = digest_part(
        ((n, t.view(torch.int16).numpy().reshape(-1).view("u2")) for n, t in run.adapter.items()),
        run.layout,
    )
    assert run.policy.digest_part() == own
    assert run.policy.name == "policy-v0"
    run.child.refuses = False
    await run.follow(0)
    assert run.policy.loaded == ("policy-v1",)


def test_a_lora_run_makes_room_for_its_versions_on_the_command_line(
    run: Run, tmp_path: Path
) -> None:
    def command(options: VllmOptions) -> list[str]:
        return serve_command(options, model_dir=tmp_path, socket=tmp_path / "s", dtype="bfloat16")

    plain = run.manifest.model_copy(update={"adapter": None})
    assert "--enable-lora" not in command(VllmOptions().for_run(plain))
    words = command(VllmOptions().for_run(run.manifest))
    assert words[words.index("--max-loras") + 1] == "4"
    assert words[words.index("--max-lora-rank") + 1] == "8"
    assert VllmOptions(adapters=9).for_run(run.manifest).adapters == 9
