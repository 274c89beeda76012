"""A LoRA run on the torch engine: adapters swapped between two forwards, logprobs as `peft` has."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from peft import LoraConfig, get_peft_model

from deltawire.protocol.adapters import AdapterManifest
from deltawire.protocol.errors import EngineError, MalformedMessage
from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Published, Publisher
from deltawire_inference.engines.torch.engine import TorchEngine

if TYPE_CHECKING:
    from tests.inference.conftest import MakeRun, Serving, TinyRun

# peft asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ADAPTER = AdapterManifest(rank=4, alpha=16.0, targets=["down_proj", "q_proj", "v_proj"])
PROMPT = [3, 1, 4, 1, 5]
SAMPLING = Sampling(max_new_tokens=16, seed=1, ignore_eos=True)


@dataclass(kw_only=True)
class LoraRun:
    """The trainer's end: a frozen base, an adapter of `peft` that moves."""

    model: torch.nn.Module
    named: dict[str, torch.nn.Parameter]
    publisher: Publisher
    store: LocalStore
    folder: Path

    run_id = "lora"

    @torch.no_grad()
    def publish(self, *, scale: float = 0.3) -> Published:
        for parameter in self.named.values():
            parameter.add_((torch.randn(parameter.shape) * scale).to(parameter.dtype))
        return self.publisher.publish(self.named.items())

    def follower(self) -> Follower:
        return Follower(self.store, self.run_id, self.folder / "cache")

    @torch.no_grad()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[len - 1] of each token given those before it, by `peft`."""
        logits = self.model(torch.tensor([token_ids])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


@pytest.fixture
def lora_run(make_run: "MakeRun", tmp_path: Path) -> Iterator[LoraRun]:
    run: TinyRun = make_run(dtype=torch.bfloat16)
    model = copy.deepcopy(run.model)
    base = dict(model.named_parameters())
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=ADAPTER.targets, init_lora_weights=False)
    peft_model = get_peft_model(model, config).to(torch.bfloat16).eval()
    adapter = {
        f"base_model.model.{name.replace('.default.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    store = LocalStore(tmp_path / "lora-bucket")
    publisher = Publisher.open(
        store,
        run_id="lora",
        named_tensors=[*base.items(), *adapter.items()],
        model_files={path.name: path for path in (run.folder / "model").iterdir()},
        adapter=ADAPTER,
    )
    with publisher:
        yield LoraRun(
            model=peft_model, named=adapter, publisher=publisher, store=store, folder=tmp_path
        )


async def started(run: LoraRun) -> tuple[TorchEngine, Follower]:
    engine, follower = TorchEngine(), run.follower()
    version = follower.head().version
    route = follower.fetch(follower.route(None, version))
    await engine.start(
        follower.model_dir(), route, manifest=follower.manifest(), version=PolicyVersion(version)
    )
    return engine, follower


async def follow(engine: TorchEngine, follower: Follower, *, mode: str = "keep") -> None:
    route = follower.route(engine.version, follower.head().version)
    await engine.apply(await engine.stage(follower.fetch(route)), mode=mode)  # type: ignore[arg-type]


async def test_behaviour_logprobs_are_pefts_at_every_version(lora_run: LoraRun) -> None:
    engine, follower = await started(lora_run)
    try:
        kinds = set()
        for scale in (0.0, 0.3, 1e-3, 0.3, 1e-3):
            if scale:
                kinds.add(lora_run.publish(scale=scale).link.kind)
                await follow(engine, follower)
            assert engine.digest == lora_run.publisher.digest == await engine.verify()
            answer = await engine.generate(
                GenerateRequest(prompt_ids=PROMPT, n=2, sampling=SAMPLING)
            )
            assert answer.adapter == f"policy-v{engine.version}"
            for completion in answer.completions:
                expected = lora_run.logprobs([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
                found = torch.tensor(completion.logprobs)
                torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
        assert kinds == {ObjectKind.ADAPTER, ObjectKind.DELTA}
    finally:
        await engine.close()


async def test_a_request_in_flight_goes_on_under_the_next_adapter_and_its_spans_say_so(
    lora_run: LoraRun,
) -> None:
    engine, follower = await started(lora_run)
    try:
        lora_run.publish()
        route = follower.route(0, follower.head().version)
        staged = await engine.stage(follower.fetch(route))
        sampling = SAMPLING.model_copy(update={"max_new_tokens": 400})
        request = GenerateRequest(prompt_ids=PROMPT, sampling=sampling)
        tokens = engine.stream(request)
        versions = [(await anext(tokens)).version]
        await engine.apply(staged, mode="keep")
        versions += [token.version async for token in tokens]
        assert versions[0] == 0
        assert versions[-1] == 1
        assert versions == sorted(versions)
    finally:
        await engine.close()


async def test_an_adapter_is_asked_for_by_the_name_of_its_version_or_not_at_all(
    lora_run: LoraRun, tmp_path: Path
) -> None:
    engine, _ = await started(lora_run)
    try:
        asked = GenerateRequest(prompt_ids=PROMPT, sampling=SAMPLING, adapter="policy-v0")
        assert (await engine.generate(asked)).adapter == "policy-v0"
        with pytest.raises(MalformedMessage, match="policy-v7"):
            await engine.generate(asked.model_copy(update={"adapter": "policy-v7"}))
        with pytest.raises(EngineError, match="an adapter itself"):
            await engine.load_adapter("other", tmp_path)
    finally:
        await engine.close()


async def test_a_replica_follows_a_lora_run(
    lora_run: LoraRun, serve: Callable[..., "AbstractAsyncContextManager[Serving]"]
) -> None:
    async with serve(lora_run, verify_s=0.01) as serving:
        for version in (1, 2, 3):
            lora_run.publish(scale=3.0)
            await serving.serves(version)
            assert serving.engine.digest == lora_run.publisher.digest
        assert {update.kind for update in serving.service.now().updates[1:]} <= {"adapter", "delta"}
        ids = [*PROMPT, 9, 2, 6]
        found = torch.tensor(await serving.engine.score(ids))[1:]
        torch.testing.assert_close(found, lora_run.logprobs(ids), atol=0.05, rtol=0.05)
