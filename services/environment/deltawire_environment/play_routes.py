"""Reset, step and state over HTTP.

Each makes an episode for one call, as OpenEnv's do; with the header `X-Deltawire-Session` (`new` on
a reset, then the id that came back) they share one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from deltawire.protocol.rollouts import Task
from deltawire_environment.client_faults import client_faults
from deltawire_environment.episodes import Episodes, task_of
from deltawire_environment.frames import result_of
from deltawire_environment.sessions import Frame, Session, SessionGone, Sessions
from deltawire_environment.ws import SESSION_HEADER

NEW_SESSION = "new"


class ResetBody(BaseModel):
    """Arguments of a reset; further ones go to the world."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(None, ge=0)
    episode_id: str | None = Field(None, max_length=255)


class StepBody(BaseModel):
    """One action."""

    model_config = ConfigDict(extra="ignore")

    action: dict[str, JsonValue]
    timeout_s: float | None = Field(None, gt=0)
    request_id: str | None = Field(None, min_length=1, max_length=255)


class StepResult(BaseModel):
    """What a reset or a step answers."""

    observation: dict[str, JsonValue]
    reward: float | None
    done: bool


def _find(sessions: Sessions, session_id: str) -> Session:
    try:
        return sessions.find(session_id)
    except SessionGone as error:
        raise HTTPException(404, detail=str(error)) from None


def add_play_routes(router: APIRouter, sessions: Sessions, episodes: Episodes) -> None:
    """POST /reset, /step; GET /state; DELETE /session."""

    @contextmanager
    def lent(request: Request, response: Response, *, may_open: bool) -> Iterator[Session]:
        wanted = request.headers.get(SESSION_HEADER)
        if wanted and not (may_open and wanted == NEW_SESSION):
            yield _find(sessions, wanted)
            return
        session = sessions.open(owned_by_socket=False)
        if wanted:
            response.headers[SESSION_HEADER] = session.id
        try:
            yield session
        finally:
            if not wanted:
                sessions.close(session)

    @router.post("/reset", tags=["play"])
    async def reset(
        request: Request, response: Response, body: ResetBody | None = None
    ) -> StepResult:
        """Begin an episode."""
        body = body or ResetBody()
        with lent(request, response, may_open=True) as session, client_faults():
            async with session.lock:
                task = task_of(body.model_dump(exclude_unset=True))
                reply = await episodes.start(session, task, episode_id=body.episode_id)
                return StepResult.model_validate(result_of(reply))

    @router.post("/step", tags=["play"])
    async def step(request: Request, response: Response, body: StepBody) -> StepResult:
        """One action. Without a session the episode is a fresh one of seed 0."""
        with lent(request, response, may_open=False) as session, client_faults():
            async with session.lock:
                key = body.request_id
                if key is not None and key in session.answers:
                    return StepResult.model_validate(session.answers[key])
                if session.episode is None:
                    await episodes.start(session, Task(), episode_id=None)
                result = result_of(await episodes.step(session, body.action))
                if key is not None:
                    session.remember(key, result)
                return StepResult.model_validate(result)

    @router.get("/state", tags=["play"])
    async def state(request: Request, response: Response) -> Frame:
        """What may be shown of a session's episode."""
        with lent(request, response, may_open=False) as session:
            return session.state()

    @router.delete("/session", tags=["play"], status_code=204)
    async def close(request: Request) -> None:
        """End the session that the header names."""
        sessions.close(_find(sessions, request.headers.get(SESSION_HEADER, "")))
