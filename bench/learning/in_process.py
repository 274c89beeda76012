"""The whole loop in one process: trainer, replica and environment as their own services serve them,
over a folder, memory streams and loopback. For models so small that starting processes costs most.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fastapi import FastAPI

from deltawire.job.resolve import ResolvedJob
from deltawire.protocol.control import TrainerStatus
from deltawire.service.metrics import Metrics
from deltawire.service.serve import bind, serve
from deltawire.store.open import open_store
from deltawire.streams.base import TrainerStreams
from deltawire.streams.open import open_trainer_streams
from deltawire_environment.app import Environment
from deltawire_environment.app import create_app as environment_app
from deltawire_environment.settings import EnvironmentSettings
from deltawire_inference.app import Inference, build_app
from deltawire_inference.engines.open import open_engine
from deltawire_inference.settings import InferenceSettings
from deltawire_trainer.events import EventHub
from deltawire_trainer.rollout_log import RolloutLog
from deltawire_trainer.service import train
from deltawire_trainer.settings import TrainerSettings
from deltawire_trainer.trainer import Trainer

RUN = "r1"


async def run(
    resolved: ResolvedJob,
    folder: Path,
    *,
    seen_through: Callable[[TrainerStreams], TrainerStreams] = lambda streams: streams,
) -> TrainerStatus:
    """Train a job to its end. A run that ended badly is told in the status.

    `seen_through` may stand between the trainer and its streams.
    """
    streams_uri = f"memory://{uuid.uuid4().hex}"
    settings = TrainerSettings.model_validate(
        {
            "run_id": RUN,
            "store": f"file://{folder}/bucket",
            "streams": streams_uri,
            "run_dir": folder / "run",
            "keep_rollouts": False,
        }
    )
    store, streams = open_store(settings.store), open_trainer_streams(streams_uri, run_id=RUN)
    trainer = Trainer(
        run_id=RUN,
        job=resolved.spec,
        model=resolved.spec.model.source,
        store=store,
        events=EventHub(),
        rollouts=RolloutLog(None),
    )
    environment = Environment(EnvironmentSettings.model_validate({}), resolved)
    async with (
        served(environment_app(environment), ws_max_size=2**16) as environment_url,
        served(build_app(_replica(settings, environment_url))),
    ):
        await train(trainer, settings, store, seen_through(streams), Metrics("trainer"))
    status = await trainer.status()
    await streams.close()
    store.close()
    return status


def _replica(settings: TrainerSettings, environment_url: str) -> Inference:
    told = InferenceSettings.model_validate(
        {
            "run_id": RUN,
            "store": settings.store,
            "streams": settings.streams,
            "environment_url": environment_url,
            "poll_s": 0.05,  # without an address of its own it is told of nothing
            "port": 0,
            "threads": 1,
            "drain_s": 0.0,
        }
    )
    return Inference(told, open_engine(told))


@asynccontextmanager
async def served(app: FastAPI, **options: object) -> AsyncIterator[str]:
    """An app on a free port of loopback; gives its URL."""
    listener = bind("127.0.0.1", 0)
    serving = asyncio.create_task(serve(app, listener, **options))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
