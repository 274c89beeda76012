"""Whatever is sent to any route of the OpenAPI document, the trainer answers without a 5xx."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from deltawire.service.metrics import Metrics
from deltawire.store.open import open_store
from deltawire.streams.open import open_trainer_streams
from deltawire_trainer.app import create_app
from deltawire_trainer.service import train

from .rig import RUN, make_job, make_settings, make_trainer

TOKEN = "fuzz"


@pytest.mark.timeout(900)
def test_schemathesis_finds_no_request_that_makes_the_trainer_fail(
    tmp_path: Path,
    base: Path,
    redis_url: str,
    serve_in_thread,
    fuzz: Callable[..., None],
) -> None:
    settings = make_settings(tmp_path)
    trainer, metrics = make_trainer(settings, make_job(base)), Metrics("trainer")
    streams = open_trainer_streams(f"{redis_url}/0", run_id=RUN)
    app = create_app(trainer, streams=streams, metrics=metrics, token=SecretStr(TOKEN))

    async def training() -> int:
        return await train(trainer, settings, open_store(settings.store), streams, metrics)

    with serve_in_thread(app, beside=training) as url:
        while httpx.get(f"{url}/readyz").status_code != 200:
            assert not trainer.failure
            time.sleep(0.05)
        # Events never end, and a stopped run has no routes that do anything.
        fuzz(
            url,
            token=TOKEN,
            leave_out=("/events", "/stop"),
            settled={"/streams/claim": {"timeout_s": 0.01}},
        )
        assert not trainer.failure
