"""The environment service: worlds behind OpenEnv's protocol, one event loop, one small process."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI, WebSocket

from deltawire.job.registry import make_world
from deltawire.job.resolve import ResolvedJob
from deltawire.job.world import World
from deltawire.protocol.control import EnvironmentStatus
from deltawire.service.app import create_service_app
from deltawire.service.body_limit import BodyLimit
from deltawire.service.metrics import Metrics
from deltawire_environment.episodes import Episodes
from deltawire_environment.http_routes import environment_routes
from deltawire_environment.mcp import McpDesk
from deltawire_environment.pool import Pool
from deltawire_environment.sessions import Sessions
from deltawire_environment.settings import EnvironmentSettings
from deltawire_environment.ws import SocketDesk

_REAP_EVERY_S = 1.0
_DRAIN_POLL_S = 0.1


class Environment:
    """Everything the service holds, put together."""

    def __init__(self, settings: EnvironmentSettings, job: ResolvedJob | None) -> None:
        self.settings, self.job = settings, job
        self.id = f"environment-{secrets.token_hex(4)}"
        self.metrics = Metrics("environment")
        self.pool = Pool(settings.pool_workers)
        self.episodes = Episodes(
            worlds=offered_worlds(settings, job),
            rewards=job.job.rewarders if job else (),
            pool=self.pool,
            metrics=self.metrics,
            step_timeout_s=settings.step_timeout_s,
        )
        for world in self.episodes.worlds.values():
            world.use_meter(self.metrics)
        self.sessions = Sessions(
            limit=settings.max_sessions,
            idle_s=settings.idle_s,
            silent_s=settings.silent_s,
            grace_s=settings.grace_s,
            close_episode=self.episodes.close,
        )
        self._started_at = time.time()

    def unready(self) -> str:
        """Why it cannot work now, or ""."""
        if self.sessions.draining:
            return "draining"
        return "too many calls of user code hang; restart the service" if self.pool.broken else ""

    async def status(self) -> EnvironmentStatus:
        """The state that GET /status shows."""
        return EnvironmentStatus(
            environment_id=self.id,
            worlds=list(self.episodes.worlds),
            active_sessions=len(self.sessions),
            max_sessions=self.sessions.limit,
            sessions_total=self.sessions.opened_total,
            steps_total=self.episodes.steps_total,
            errors_total=self.episodes.errors_total,
            reaped_total=self.sessions.reaped_total,
            draining=self.sessions.draining,
            started_at=self._started_at,
        )

    async def drain(self) -> None:
        """Take no new sessions and wait for the running ones, at most `drain_s`."""
        self.sessions.draining = True
        for _ in range(round(self.settings.drain_s / _DRAIN_POLL_S)):
            if not self.sessions:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def reap(self) -> None:
        """Close what was left behind, for ever."""
        while True:
            await asyncio.sleep(_REAP_EVERY_S)
            self.sessions.reap()
            self.metrics.set("sessions_active", len(self.sessions))
            self.metrics.set("pool_hanging", self.pool.hanging)

    async def close(self) -> None:
        """The end: every episode gives back what it holds."""
        self.sessions.close_all()
        await self.episodes.closed()
        for world in self.episodes.worlds.values():
            world.close()
        self.pool.close()


def create_app(environment: Environment) -> FastAPI:
    """The app over finished objects."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            reaper = group.create_task(environment.reap())
            try:
                yield
            finally:
                reaper.cancel()
                await environment.close()

    app = create_service_app(
        title="environment",
        status=environment.status,
        unready=environment.unready,
        metrics=environment.metrics,
        token=environment.settings.token,
        lifespan=lifespan,
    )
    sessions, episodes = environment.sessions, environment.episodes
    mcp = McpDesk(sessions=sessions, episodes=episodes)
    desk = SocketDesk(sessions=sessions, episodes=episodes, mcp=mcp)
    app.include_router(
        environment_routes(sessions=sessions, episodes=episodes, mcp=mcp, job=environment.job)
    )
    app.add_middleware(BodyLimit, limit_bytes=environment.settings.body_bytes)

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        await desk.serve(socket)

    return app


def offered_worlds(settings: EnvironmentSettings, job: ResolvedJob | None) -> Mapping[str, World]:
    """Worlds by name; the job's is the first."""
    worlds: dict[str, World] = {}
    if job is not None:
        worlds[job.spec.env.name] = job.world
    for name in settings.worlds or ([] if job else ["guess"]):
        worlds.setdefault(name, make_world(name, {}))
    return worlds
