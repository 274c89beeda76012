"""A LoRA run on vLLM: every version under its own name, logprobs as `peft` has, old ones gone."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_runs import PROMPTS, MakeReplica, MakeRun, Replica, TinyRun

from deltawire.protocol.adapters import AdapterManifest
from deltawire.protocol.generation import Completion, GenerateRequest, Sampling
from deltawire.protocol.layout import ObjectKind
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher

# peft asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ADAPTER = AdapterManifest(rank=4, alpha=8.0, targets=["down_proj", "q_proj", "v_proj"])
Move = Callable[[float], ObjectKind]


def lora_run(run: TinyRun, folder: Path) -> tuple[TinyRun, Publisher, Move]:
    """The tiny model under an adapter of `peft`, published as run `lora` to the same bucket."""
    model = run.model.to(torch.bfloat16)
    base = dict(model.named_parameters())
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTER.targets, init_lora_weights=False)
    peft_model = get_peft_model(model, config).to(torch.bfloat16).eval()
    adapter = {
        f"base_model.model.{name.replace('.default.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    publisher = Publisher.open(
        run.store,
        run_id="lora",
        named_tensors=[*base.items(), *adapter.items()],
        model_files={path.name: path for path in (run.folder / "model").iterdir()},
        owner_file=folder / "owner",
        adapter=ADAPTER,
    )

    @torch.no_grad()
    def move(scale: float) -> ObjectKind:
        for parameter in adapter.values():
            noise = torch.randn(parameter.shape, generator=run.random)
            parameter.add_((noise * scale).to(parameter.dtype))
        return publisher.publish(adapter.items()).link.kind

    return TinyRun(folder, peft_model, publisher, run.store, run.random), publisher, move


async def asked(replica: Replica, *, tokens: int = 24) -> tuple[Completion, str | None]:
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    request = GenerateRequest(prompt_ids=PROMPTS[0], sampling=sampling)
    answer = await replica.engine.generate(request)
    return answer.completions[0], answer.adapter


@torch.no_grad()
def close_to_peft(run: TinyRun, completion: Completion) -> None:
    ids = [*PROMPTS[0], *completion.token_ids]
    logits = run.model(torch.tensor([ids])).logits[0, :-1].float()
    whole = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = torch.tensor(completion.logprobs)
    torch.testing.assert_close(found, whole[len(PROMPTS[0]) - 1 :], atol=0.1, rtol=0.05)


async def test_versions_of_an_adapter_follow_each_other_and_each_answer_proves_its_own(
    make_run: MakeRun, make_replica: MakeReplica, tmp_path: Path
) -> None:
    run, publisher, move = lora_run(make_run("untied"), tmp_path / "lora")
    replica = make_replica(run)
    replica.follower = Follower(run.store, "lora", tmp_path / "cache")
    with publisher:
        await replica.start()
        engine = replica.engine
        answers, kinds = set(), set()
        for version, scale in enumerate((0.0, 0.1, 1e-4, 0.1)):
            if scale:
                kinds.add(move(scale))
                await replica.follow()
            completion, name = await asked(replica)
            assert name == f"policy-v{version}"
            assert [span.version for span in completion.spans] == [version]
            assert await engine.verify() == engine.digest == publisher.digest
            close_to_peft(run, completion)
            answers.add(str(completion.token_ids))
        assert len(answers) >= 3
        assert kinds == {ObjectKind.DELTA, ObjectKind.ADAPTER}
        policy = engine._running.policy  # type: ignore[union-attr]
        assert policy.loaded == ("policy-v3",)

        long = asyncio.create_task(asked(replica, tokens=1500))
        while engine.load().running == 0:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.01)
        move(0.1)
        await replica.follow()
        if not long.done():
            assert policy.loaded == ("policy-v3", "policy-v4")
        after, name = await asked(replica)
        assert (name, after.spans[0].version) == ("policy-v4", 4)
        before, name = await long
        assert name == "policy-v3"
        assert [(s.version, s.start, s.end) for s in before.spans] == [(3, 0, 1500)]
        assert policy.loaded == ("policy-v4",)

        move(0.1)
        await replica.follow("drain")
        assert (await asked(replica))[1] == "policy-v5"
