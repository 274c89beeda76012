"""The trainer's REST face. Handlers accept a record, call one method, return a record."""

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import SecretStr

from deltawire.protocol.control import PAUSE, RESUME, STOP, SYNC, Problem, WeightNotice
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.wire_model import WireModel
from deltawire.service.app import create_service_app
from deltawire.service.auth import OPEN_PATHS
from deltawire.service.metrics import Metrics
from deltawire.service.streams_face import create_streams_router
from deltawire.streams.base import ProducerStreams
from deltawire_trainer.rollout_log import RolloutDetail, RolloutSummary
from deltawire_trainer.trainer import NotOpen, Trainer

_DASHBOARD = "/"
"""The page holds no data: it asks for the token, and with it for /status."""


class Acknowledged(WireModel):
    """What a command led to."""

    state: str


class PublishedVersion(WireModel):
    """One object of the live chain."""

    version: int
    kind: ObjectKind
    key: str
    base_version: int | None
    bytes: int
    changed: int | None
    total: int | None
    encoding: str
    new_digest: str


def create_app(
    trainer: Trainer, *, streams: ProducerStreams, metrics: Metrics, token: SecretStr | None
) -> FastAPI:
    """All routes over a trainer that is, or soon will be, running."""
    app = create_service_app(
        title="trainer",
        status=trainer.status,
        unready=trainer.unready,
        metrics=metrics,
        token=token,
        open_paths=OPEN_PATHS | {_DASHBOARD},
    )
    app.add_exception_handler(NotOpen, _answer_not_open)
    app.include_router(create_streams_router(streams))
    app.include_router(control_routes(trainer))
    app.include_router(view_routes(trainer))
    return app


def control_routes(trainer: Trainer) -> APIRouter:
    """Routes that change what the run does."""
    router = APIRouter(tags=["control"])

    @router.post(SYNC)
    async def sync() -> WeightNotice:
        """Publish what is not yet published; coordinates of the newest version."""
        notice = await trainer.running().sync_now()
        if notice is None:
            raise NotOpen("this trainer has not published a version yet")
        return notice

    @router.post(PAUSE)
    async def pause() -> Acknowledged:
        """Hold before the next step."""
        trainer.running().pause()
        return Acknowledged(state="paused")

    @router.post(RESUME)
    async def resume() -> Acknowledged:
        """Go on."""
        trainer.running().resume()
        return Acknowledged(state=trainer.state)

    @router.post(STOP)
    async def stop() -> Acknowledged:
        """End the run after the step in flight, as if it were the last one.

        For good: a trainer that is killed and started again ends the run as well.
        """
        trainer.running().stop("stopped on request")
        return Acknowledged(state=trainer.state)

    return router


def view_routes(trainer: Trainer) -> APIRouter:
    """Routes that show the run."""
    router = APIRouter(tags=["views"])

    @router.get("/versions")
    async def versions() -> list[PublishedVersion]:
        """The live chain, oldest first."""
        links = trainer.opened().publishing.publisher.head.links
        return [
            PublishedVersion.model_validate(link.model_dump(include=_SHOWN_OF_A_LINK))
            for link in sorted(links, key=lambda link: (link.version, link.kind))
        ]

    @router.get("/rollouts")
    async def rollouts(limit: Annotated[int, Query(ge=1, le=512)] = 32) -> list[RolloutSummary]:
        """What was trained on, newest first."""
        return trainer.rollouts.newest(limit)

    @router.get("/rollouts/{rollout_id:path}")
    async def rollout(rollout_id: str) -> RolloutDetail:
        """One rollout with its tokens."""
        found = trainer.rollouts.find(rollout_id)
        if found is None:
            raise HTTPException(404, f"no rollout {rollout_id!r} among the newest ones")
        return found

    @router.get("/events", response_class=StreamingResponse)
    async def events() -> StreamingResponse:
        """Server-sent events: step, sync, eval, state."""
        return StreamingResponse(trainer.events.stream(), media_type="text/event-stream")

    @router.get(_DASHBOARD, response_class=HTMLResponse, include_in_schema=False)
    async def dashboard() -> HTMLResponse:
        """A page for people."""
        return HTMLResponse(files("deltawire_trainer").joinpath("dashboard.html").read_text())

    return router


_SHOWN_OF_A_LINK = set(PublishedVersion.model_fields)


async def _answer_not_open(request: Request, error: Exception) -> JSONResponse:
    problem = Problem(type="NotOpen", title="not open yet", status=503, detail=str(error))
    return JSONResponse(problem.model_dump(), 503, headers={"Retry-After": "1"})
