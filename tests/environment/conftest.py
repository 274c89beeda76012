"""A running environment service on a free port of this machine, in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from deltawire.job.job import Job
from deltawire.job.resolve import resolve
from deltawire.service.serve import bind
from deltawire_environment.app import Environment, create_app
from deltawire_environment.settings import EnvironmentSettings


@dataclass
class Running:
    environment: Environment
    url: str

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/ws"

    async def emptied(self) -> None:
        """Until no session is left."""
        for _ in range(1000):
            if not len(self.environment.sessions):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{len(self.environment.sessions)} sessions are left")

    def http(self, **options: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=20, **options)  # type: ignore[arg-type]


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture
def serve_environment(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`async with serve_environment(job=…, max_sessions=…) as running`."""
    for name in ("ENVIRONMENT_JOB", "ENVIRONMENT_WORLDS", "ENVIRONMENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    @contextlib.asynccontextmanager
    async def serve(*, job: Job | None = None, **settings: object) -> AsyncIterator[Running]:
        environment = Environment(
            EnvironmentSettings(**settings),  # type: ignore[arg-type]
            resolve(job) if job else None,
        )
        config = uvicorn.Config(
            create_app(environment),
            log_config=None,
            ws="websockets-sansio",
            ws_max_size=environment.settings.frame_bytes,
            ws_per_message_deflate=False,
            ws_ping_interval=environment.settings.ping_s or None,
            ws_ping_timeout=environment.settings.ping_s or None,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        listener = bind("127.0.0.1", 0)
        task = asyncio.create_task(server._serve([listener]))
        for _ in range(1000):
            if server.started:
                break
            await asyncio.sleep(0.01)
        try:
            yield Running(environment, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            await task
            listener.close()

    return serve
