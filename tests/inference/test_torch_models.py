"""Other architectures on the torch engine: those it serves are exact, the others are refused."""

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from deltawire.protocol.errors import EngineError
from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire_inference.engines.torch.engine import TorchEngine

if TYPE_CHECKING:
    from tests.inference.conftest import MakeRun

SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
SERVED = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "mistral, a window of eight": MistralConfig(**SIZES, sliding_window=8, head_dim=8),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "phi3": Phi3Config(**SIZES),
}


@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED)
async def test_greedy_tokens_equal_those_of_transformers(
    make_run: "MakeRun", config: PreTrainedConfig
) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    run = make_run(dtype=torch.float32, model=model)
    engine = TorchEngine()
    await run.start(engine, run.follower())
    sampling = Sampling(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    prompts = [[5, 6, 7, 8, *range(20, 20 + 4 * i)] for i in range(1, 4)]

    answers = await asyncio.gather(
        *(engine.generate(GenerateRequest(prompt_ids=p, sampling=sampling)) for p in prompts)
    )
    await engine.close()

    for prompt, answer in zip(prompts, answers, strict=True):
        token_ids = answer.completions[0].token_ids
        whole = [*prompt, *token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([whole]), use_cache=False).logits[0]
        assert token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


async def test_attention_with_a_cap_is_refused_with_a_way_out(make_run: "MakeRun") -> None:
    model = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES, head_dim=8))
    run = make_run(dtype=torch.float32, model=model)

    with pytest.raises(EngineError, match=r"softcap.*INFERENCE_ENGINE=vllm"):
        await run.start(TorchEngine(), run.follower())
