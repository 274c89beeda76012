"""LoRA: every version under its own name, old ones gone, and the answer proves who gave it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import PROMPTS, MakeReplica, MakeRun, Replica, TinyRun, greedy, sampled

from deltawire.protocol.errors import DeltawireError, MalformedMessage
from deltawire.protocol.generation import Completion, GenerateRequest, Sampling
from deltawire_inference.engines.vllm.adapters import CONFIG_KEY

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def make_adapter(run: TinyRun, folder: Path, *, seed: int) -> Path:
    """A LoRA adapter as `peft` writes it, with random weights on both sides."""
    import copy

    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(run.model), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(str(folder))
    return folder


def single_file(folder: Path) -> Path:
    """The same adapter as it travels through the bucket: one file, configuration inside."""
    from safetensors.torch import load_file

    config = (folder / "adapter_config.json").read_text()
    path = folder.with_suffix(".safetensors")
    save_file(load_file(folder / "adapter_model.safetensors"), path, metadata={CONFIG_KEY: config})
    return path


async def ask(replica: Replica, adapter: str | None) -> tuple[list[Completion], str | None]:
    sampling = Sampling(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    request = GenerateRequest(prompt_ids=PROMPTS[0], sampling=sampling, adapter=adapter)
    answer = await replica.engine.generate(request)
    return answer.completions, answer.adapter


async def test_adapter_versions_answer_under_their_own_names_and_survive_a_base_update(
    make_run: MakeRun, make_replica: MakeReplica, tmp_path: Path
) -> None:
    run = make_run("untied", encoding="compact")
    replica = make_replica(run, adapters=2, max_lora_rank=8)
    await replica.start()
    engine = replica.engine
    files = [make_adapter(run, tmp_path / f"a{i}", seed=i) for i in (1, 2, 3)]
    base, _ = await ask(replica, None)

    await engine.load_adapter("policy-v1", files[0])
    await engine.load_adapter("policy-v2", single_file(files[1]))
    one, said_one = await ask(replica, "policy-v1")
    two, said_two = await ask(replica, "policy-v2")
    assert (said_one, said_two) == ("policy-v1", "policy-v2")
    answers = [sampled(c) for c in (base, one, two)]
    assert len({str(answer) for answer in answers}) == 3
    assert sampled((await ask(replica, None))[0]) == answers[0]

    await engine.load_adapter("policy-v3", files[2])
    with pytest.raises(MalformedMessage, match="policy-v1"):
        await ask(replica, "policy-v1")  # the oldest made room
    with pytest.raises(DeltawireError):
        broken = tmp_path / "broken.safetensors"
        save_file({"x": torch.zeros(1)}, broken, metadata={CONFIG_KEY: json.dumps({"r": 8})})
        await engine.load_adapter("policy-v4", broken)
    assert sampled((await ask(replica, "policy-v2"))[0]) == answers[2]

    run.step()
    await replica.follow()
    assert await engine.verify() == run.publisher.digest
    moved, said = await ask(replica, "policy-v2")
    assert said == "policy-v2"
    assert sampled(moved) != answers[2]
    patched = [sampled(moved), sampled(await greedy(engine))]
    await engine.close()

    fresh = make_replica(run, adapters=2, max_lora_rank=8)
    await fresh.start()
    await fresh.engine.load_adapter("policy-v2", files[1])
    assert [sampled((await ask(fresh, "policy-v2"))[0]), sampled(await greedy(fresh.engine))] == (
        patched
    )
