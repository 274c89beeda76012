"""The app every service starts from: health, status, metrics, auth and problem answers."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, SecretStr
from starlette.responses import JSONResponse, PlainTextResponse

from deltawire.protocol.control import HEALTHZ, METRICS, READYZ, STATUS
from deltawire.service.auth import OPEN_PATHS, TokenAuth
from deltawire.service.metrics import Metrics
from deltawire.service.problems import install_problem_handlers

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_service_app(
    *,
    title: str,
    status: Callable[[], Awaitable[BaseModel]],
    unready: Callable[[], str],
    metrics: Metrics,
    token: SecretStr | None,
    lifespan: Lifespan | None = None,
    open_paths: frozenset[str] = OPEN_PATHS,
) -> FastAPI:
    """A FastAPI app with the routes all services share.

    `status` makes the typed state of GET /status. `unready` says why the service cannot work yet,
    or "" when it can. Everything but `open_paths` needs the token.
    """
    app = FastAPI(title=f"deltawire {title}", version="0.1.0", lifespan=lifespan)
    install_problem_handlers(app)
    app.add_middleware(TokenAuth, token=token, open_paths=open_paths)

    @app.get(HEALTHZ, tags=["health"])
    async def healthz() -> dict[str, str]:
        """Alive."""
        return {"status": "alive"}

    @app.get(READYZ, tags=["health"])
    async def readyz() -> JSONResponse:
        """200 when it can work, 503 with a reason when it cannot yet."""
        reason = unready()
        return JSONResponse({"ready": not reason, "reason": reason}, 503 if reason else 200)

    @app.get(STATUS, tags=["status"])
    async def show_status() -> Response:
        """Typed state: versions, lags, counters."""
        # Not a JSONResponse, which refuses the NaN of a loss just when people look.
        return Response((await status()).model_dump_json(), media_type="application/json")

    @app.get(METRICS, tags=["status"], response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Prometheus text."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return app
