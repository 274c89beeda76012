"""LoRA adapters on the torch engine, against peft."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from deltawire.protocol.errors import EngineError, MalformedMessage, MalformedObject
from deltawire.protocol.generation import GenerateRequest, Sampling

if TYPE_CHECKING:
    from tests.inference.conftest import MakeEngine, MakeRun, TinyRun

# peft asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SAMPLING = Sampling(max_new_tokens=12, seed=1, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]


def make_adapter(run: "TinyRun", folder: Path, *, seed: int, **options: object) -> Path:
    """A random adapter as peft saves it."""
    torch.manual_seed(seed)
    base = type(run.model)(run.model.config).eval()
    base.load_state_dict(run.model.state_dict())
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        **options,
    )
    get_peft_model(base, config).save_pretrained(folder)
    return folder


@torch.no_grad()
def adapted_logprobs(run: "TinyRun", folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[len - 1] of each token given those before it, by peft."""
    base = type(run.model)(run.model.config).eval()
    base.load_state_dict(run.model.state_dict())
    model = PeftModel.from_pretrained(base, folder).eval()
    logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


async def test_rows_with_different_adapters_run_side_by_side_as_peft_would(
    make_run: "MakeRun", make_engine: "MakeEngine", tmp_path: Path
) -> None:
    run = make_run(dtype=torch.float32)
    engine, follower = await make_engine(run)
    folders = {
        "game@1": make_adapter(run, tmp_path / "1", seed=1),
        "game@2": make_adapter(run, tmp_path / "2", seed=2, use_rslora=True),
    }
    for name, folder in folders.items():
        await engine.load_adapter(name, folder)

    async def check() -> None:
        names = [None, "game@1", "game@2"]
        answers = await asyncio.gather(
            *(
                engine.generate(
                    GenerateRequest(prompt_ids=PROMPT, n=2, sampling=SAMPLING, adapter=name)
                )
                for name in names
            )
        )
        for name, answer in zip(names, answers, strict=True):
            assert answer.adapter == name
            for completion in answer.completions:
                whole = [*PROMPT, *completion.token_ids]
                expected = (
                    adapted_logprobs(run, folders[name], whole) if name else run.logprobs(whole)
                )
                torch.testing.assert_close(
                    torch.tensor(completion.logprobs), expected[4:], atol=1e-4, rtol=1e-4
                )
        assert len({tuple(a.completions[0].token_ids) for a in answers}) == 3

    await check()
    run.publish()
    await run.follow(engine, follower)
    await check()


async def test_one_file_with_its_configuration_inside_is_an_adapter_too(
    make_run: "MakeRun", make_engine: "MakeEngine", tmp_path: Path
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)
    folder = make_adapter(run, tmp_path / "a", seed=1)
    lone = tmp_path / "step_000001.safetensors"
    config = (folder / "adapter_config.json").read_text()
    save_file(
        load_file(folder / "adapter_model.safetensors"), lone, metadata={"adapter_config": config}
    )
    await engine.load_adapter("folder", folder)
    await engine.load_adapter("file", lone)

    first, second = [
        await engine.generate(GenerateRequest(prompt_ids=PROMPT, sampling=SAMPLING, adapter=name))
        for name in ("folder", "file")
    ]

    assert first.completions == second.completions


async def test_a_name_never_comes_to_mean_other_weights(
    make_run: "MakeRun", make_engine: "MakeEngine", tmp_path: Path
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)
    first = make_adapter(run, tmp_path / "1", seed=1)
    await engine.load_adapter("a", first)
    await engine.load_adapter("a", first)

    with pytest.raises(EngineError, match="new name"):
        await engine.load_adapter("a", make_adapter(run, tmp_path / "2", seed=2))
    with pytest.raises(MalformedMessage, match="loaded: a"):
        await engine.generate(GenerateRequest(prompt_ids=PROMPT, adapter="b"))


async def test_what_is_no_plain_lora_for_this_model_is_refused(
    make_run: "MakeRun", make_engine: "MakeEngine", tmp_path: Path
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)
    (tmp_path / "empty").mkdir()
    bare = tmp_path / "bare.safetensors"
    save_file({"model.norm.lora_A.weight": torch.ones(2, 2)}, bare)
    foreign = make_adapter(run, tmp_path / "foreign", seed=1)
    tensors = load_file(foreign / "adapter_model.safetensors")
    save_file(
        {key.replace("layers.1", "layers.9"): tensor for key, tensor in tensors.items()},
        foreign / "adapter_model.safetensors",
    )
    dora = make_adapter(run, tmp_path / "dora", seed=1, use_dora=True)

    for path in (tmp_path / "empty", bare, foreign, dora):
        with pytest.raises(MalformedObject, match=path.name):
            await engine.load_adapter("x", path)
