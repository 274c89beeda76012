"""A tiny model made here, and samples that look like rollouts of it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltawire_trainer.policy import Policy
from deltawire_trainer.samples import TrainingSample

VOCABULARY = 61


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers, grouped heads, tied embeddings: small enough for thousands of forwards."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def policy() -> Policy:
    """An exact (full precision) policy over the tiny model."""
    return Policy(tiny_llama())


MakeSample = Callable[..., TrainingSample]


@pytest.fixture
def make_sample() -> MakeSample:
    """Build a sample from ids, the positions trained and an advantage."""

    def make(
        token_ids: list[int],
        trained: list[int],
        *,
        advantage: float = 1.0,
        logprob: float = -1.0,
        version: int = 0,
        name: str = "r",
        sampling_mask: list[list[int]] | None = None,
    ) -> TrainingSample:
        return TrainingSample(
            group_id="g",
            rollout_id=name,
            token_ids=np.array(token_ids, dtype=np.int64),
            trained=np.array(trained, dtype=np.int64),
            behaviour_logprobs=np.full(len(trained), logprob, dtype=np.float32),
            versions=np.full(len(trained), version, dtype=np.int64),
            advantage=advantage,
            sampling_mask=sampling_mask,
        )

    return make
