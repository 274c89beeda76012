"""The inference service: a replica that follows a run, and the routes in front of it."""

import asyncio
import contextlib
import logging
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request, Response

from deltawire.protocol.control import ReplicaStatus
from deltawire.rollout.environment import EnvironmentClient
from deltawire.service.app import create_service_app
from deltawire.service.body_limit import BodyLimit
from deltawire.service.metrics import Metrics
from deltawire.store.open import open_store
from deltawire.streams.open import open_streams
from deltawire.sync.follower import Follower
from deltawire_inference.admission import Admission
from deltawire_inference.engines.base import Engine
from deltawire_inference.production import Production
from deltawire_inference.replica import Replica
from deltawire_inference.routes.disconnect import CallerGone
from deltawire_inference.routes.generate import generate_routes
from deltawire_inference.routes.openai import openai_routes
from deltawire_inference.routes.rollouts import rollout_routes
from deltawire_inference.routes.weights import weight_routes
from deltawire_inference.settings import InferenceSettings
from deltawire_inference.text import ReplicaText

log = logging.getLogger(__name__)

_HEARTBEAT_S = 2.0
"""Between two heartbeats; the gauges of /metrics are as old at most."""
_CLIENT_CLOSED = 499
"""nginx's status for a caller that left; nobody reads it."""


class Inference:
    """Everything the service holds, put together."""

    def __init__(self, settings: InferenceSettings, engine: Engine) -> None:
        self.settings, self.engine = settings, engine
        self.metrics = Metrics("inference")
        self._folder = tempfile.TemporaryDirectory(prefix="deltawire-replica-")
        self._store = open_store(settings.store)
        follower = Follower(
            self._store, settings.run_id, settings.cache_dir or Path(self._folder.name)
        )
        self.replica = Replica(
            replica_id=settings.replica_id or f"replica-{secrets.token_hex(4)}",
            follower=follower,
            engine=engine,
            metrics=self.metrics,
            poll_s=settings.poll_s,
            swap_mode=settings.swap_mode,
            verify_s=settings.verify_s,
        )
        self.text = ReplicaText(follower)
        self.admission = Admission(lambda: self.replica.state)
        self.production = self._production()
        self._started_at = time.time()

    def unready(self) -> str:
        """Why it cannot work now, or ""."""
        match self.replica.state:
            case "joining" | "broken" | "draining" as state:
                return f"{state}; {self.replica.last_error}".rstrip("; ")
            case _:
                return ""

    async def status(self) -> ReplicaStatus:
        """What GET /status shows."""
        return self.now()

    def now(self) -> ReplicaStatus:
        """The state of this moment; also the heartbeat."""
        replica, load = self.replica, self.engine.load()
        self.metrics.set("tokens_per_second", load.tokens_per_s)
        self.metrics.set("requests_running", load.running)
        self.metrics.set("requests_waiting", load.waiting)
        producer = self.production.producer
        return ReplicaStatus(
            replica_id=replica.replica_id,
            run_id=self.settings.run_id,
            url=self.settings.url,
            engine=self.engine.name,
            state=replica.state,
            version=self.engine.version,
            head_version=replica.head_version,
            digest=self.engine.digest,
            updates=list(replica.history.newest),
            updates_total=replica.history.total,
            rejected_total=replica.routing.rejected_total,
            last_error=replica.last_error or self.production.problem,
            running_requests=load.running + load.waiting,
            tokens_per_s=load.tokens_per_s,
            tokens_total=load.tokens_total,
            episodes_running=producer.counters.episodes_running if producer else 0,
            groups_finished=producer.counters.groups_finished if producer else 0,
            store_budget=self._store.budget().as_numbers(),
            swap_mode=replica.swap_mode,
            waits_for=producer.waits_for if producer else "",
            capabilities=sorted(self.engine.capabilities),
            started_at=self._started_at,
        )

    async def run(self) -> None:
        """Follow, produce and send heartbeats until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.replica.run())
            group.create_task(self.production.run())
            group.create_task(self._pulse())

    async def _pulse(self) -> None:
        while True:
            await self.production.register(self.now())
            await asyncio.sleep(_HEARTBEAT_S)

    async def drain(self) -> None:
        """Between SIGTERM and the end: no new work, what runs finishes or is given back."""
        self.replica.drain()
        await self.production.drain()

    async def close(self) -> None:
        """Let go of everything."""
        await self.engine.close()
        await self.production.close()
        self._store.close()
        self._folder.cleanup()

    def _production(self) -> Production:
        settings = self.settings
        urls = [url.strip() for url in settings.environment_url.split(",") if url.strip()]
        token = settings.environment_token or settings.token
        streams = settings.streams.get_secret_value() if settings.streams else None
        return Production(
            self.replica,
            self.text,
            streams=open_streams(streams, run_id=settings.run_id, token=settings.token)
            if streams
            else None,
            environment=EnvironmentClient(urls, token=token) if urls else None,
            concurrency=settings.concurrency,
            drain_s=settings.drain_s,
        )


def build_app(service: Inference) -> FastAPI:
    """The app over finished objects."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        running.add_done_callback(_end_with)
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await service.close()

    app = create_service_app(
        title="inference",
        status=service.status,
        unready=service.unready,
        metrics=service.metrics,
        token=service.settings.token,
        lifespan=lifespan,
    )
    replica, admission = service.replica, service.admission
    app.include_router(generate_routes(replica, admission))
    app.include_router(openai_routes(replica, service.text, admission))
    app.include_router(weight_routes(replica))
    app.include_router(
        rollout_routes(service.production, admission, run_id=service.settings.run_id)
    )
    app.add_exception_handler(CallerGone, _nobody_reads)
    app.add_middleware(BodyLimit, limit_bytes=service.settings.body_bytes)
    return app


def _end_with(task: "asyncio.Task[None]") -> None:
    """A replica that no longer follows must not go on looking well: end, to be started again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the replica ended", exc_info=error)
        signal.raise_signal(signal.SIGTERM)


async def _nobody_reads(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)
