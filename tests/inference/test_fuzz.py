"""Whatever is sent to any route of the OpenAPI document, a replica answers without a 5xx."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from deltawire_environment.app import Environment, create_app
from deltawire_environment.settings import EnvironmentSettings
from deltawire_inference.app import Inference, build_app
from deltawire_inference.engines.torch.engine import TorchEngine
from deltawire_inference.settings import InferenceSettings

if TYPE_CHECKING:
    from tests.inference.conftest import MakeRun

TOKEN = "fuzz"
SETTLED = {
    "/rollouts": {"deadline_s": 0.2},
    "/v1/completions": {"model": "tiny"},
    "/v1/chat/completions": {"model": "tiny"},
}


def short_model() -> LlamaForCausalLM:
    """A context of 24 tokens: a request for more is refused, a long answer soon over."""
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=24,
    )
    return LlamaForCausalLM(config)


@pytest.mark.timeout(900)
def test_schemathesis_finds_no_request_that_makes_a_replica_fail(
    make_run: "MakeRun",
    serve_in_thread,
    fuzz: Callable[..., None],
) -> None:
    run = make_run(model=short_model())
    world = Environment(EnvironmentSettings(worlds=["letters"]), None)
    with serve_in_thread(create_app(world)) as world_url:
        settings = InferenceSettings.model_validate(
            {
                "store": run.store.uri,
                "run_id": run.run_id,
                "token": TOKEN,
                "environment_url": world_url,
            }
        )
        service = Inference(settings, TorchEngine())
        with serve_in_thread(build_app(service)) as url:
            while httpx.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.05)
            # Paused, it would keep every request waiting, as it should.
            fuzz(url, token=TOKEN, leave_out=("/pause",), settled=SETTLED)
            assert service.replica.state == "serving", service.replica.last_error
