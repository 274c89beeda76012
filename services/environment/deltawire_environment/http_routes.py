"""The HTTP side: OpenEnv's routes, capacity, the job, and scores.

Reset and step over HTTP make an episode for one call, as OpenEnv's do; with the header
`X-Deltawire-Session` (`new` on a reset, then the id that came back) they share one.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from deltawire.job.resolve import ResolvedJob
from deltawire.job.score_messages import ScoreAnswer, ScoreReply, ScoreRequest
from deltawire.job.world import BadAction, World
from deltawire.protocol.rollouts import Task
from deltawire_environment.episodes import Episodes, task_of
from deltawire_environment.frames import result_of
from deltawire_environment.mcp import McpDesk
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


class SplitBody(BaseModel):
    """Names a split."""

    split: str = Field(max_length=255)


class TaskBody(SplitBody):
    """Names a task."""

    index: int = Field(ge=0)


class TaskRangeBody(SplitBody):
    """Names a run of tasks."""

    start: int = Field(0, ge=0)
    stop: int | None = Field(None, ge=0)


def environment_routes(
    *, sessions: Sessions, episodes: Episodes, mcp: McpDesk, job: ResolvedJob | None
) -> APIRouter:
    """All routes but the sockets."""
    router = APIRouter()
    _add_play(router, sessions, episodes)
    _add_description(router, sessions, episodes, job)
    _add_tasks(router, episodes)
    _add_score(router, episodes)

    @router.post("/mcp", tags=["mcp"])
    async def call_mcp(request: Request) -> Frame:
        """JSON-RPC 2.0: tools/list, tools/call, and sessions for them."""
        try:
            message = json.loads(await request.body())
        except (ValueError, RecursionError):
            fault: Frame = {"code": -32700, "message": "the body is not JSON"}
            return {"jsonrpc": "2.0", "id": None, "error": fault}
        return await mcp.answer(message)

    return router


@contextmanager
def _client_faults() -> Iterator[None]:
    """A client's mistakes are 422 with a reason."""
    try:
        yield
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        raise HTTPException(422, detail=[{**item} for item in wrong]) from None
    except BadAction as error:
        raise HTTPException(422, detail=str(error)) from None


def _find(sessions: Sessions, session_id: str) -> Session:
    try:
        return sessions.find(session_id)
    except SessionGone as error:
        raise HTTPException(404, detail=str(error)) from None


def _add_play(router: APIRouter, sessions: Sessions, episodes: Episodes) -> None:
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
        with lent(request, response, may_open=True) as session, _client_faults():
            async with session.lock:
                task = task_of(body.model_dump(exclude_unset=True))
                reply = await episodes.start(session, task, episode_id=body.episode_id)
                return StepResult.model_validate(result_of(reply))

    @router.post("/step", tags=["play"])
    async def step(request: Request, response: Response, body: StepBody) -> StepResult:
        """One action. Without a session the episode is a fresh one of seed 0."""
        with lent(request, response, may_open=False) as session, _client_faults():
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


def _add_description(
    router: APIRouter, sessions: Sessions, episodes: Episodes, job: ResolvedJob | None
) -> None:
    @router.get("/health", tags=["health"])
    async def health() -> dict[str, str]:
        """OpenEnv's word for alive."""
        return {"status": "degraded" if sessions.draining else "healthy"}

    @router.get("/capacity", tags=["status"])
    async def capacity() -> dict[str, int]:
        """Sessions taken, free and at most."""
        taken = len(sessions)
        return {
            "active_sessions": taken,
            "max_sessions": sessions.limit,
            "free_sessions": 0 if sessions.draining else max(0, sessions.limit - taken),
        }

    @router.get("/metadata", tags=["description"])
    async def metadata() -> dict[str, str | None]:
        """Name and description of the default world."""
        world = episodes.world()
        return {
            "name": world.name,
            "description": world.description or world.name,
            "readme_content": None,
            "version": "0.1.0",
            "author": None,
            "documentation_url": None,
        }

    @router.get("/schema", tags=["description"])
    async def schema(environment: str = "") -> dict[str, Frame]:
        """JSON schemas of actions, observations and state."""
        with _client_faults():
            world = episodes.world(environment)
        return {"action": world.action_schema(), "observation": OBSERVATION, "state": STATE}

    @router.get("/job", tags=["description"])
    async def show_job() -> Frame:
        """The resolved job, for the trainer. 404 without a job file."""
        if job is None:
            raise HTTPException(404, detail="no job file was given (ENVIRONMENT_JOB)")
        shown: Frame = job.spec.model_dump(mode="json")
        return shown


def _add_tasks(router: APIRouter, episodes: Episodes) -> None:
    def world_of(name: str, split: str | None = None) -> World:
        found = next((w for key, w in episodes.worlds.items() if key.lower() == name.lower()), None)
        if found is None:
            raise HTTPException(404, detail=f"unknown environment {name!r}")
        if split is not None and split not in found.splits():
            raise HTTPException(400, detail=f"unknown split; there are: {found.splits()}")
        return found

    def count_of(world: World, split: str) -> int:
        count = world.task_count(split)
        if count is None:
            raise HTTPException(
                501, detail="this world makes a task for every seed; none are listed"
            )
        return count

    @router.get("/list_environments", tags=["tasks"])
    async def list_environments() -> list[str]:
        """Worlds by name; the first is the default."""
        return list(episodes.worlds)

    @router.get("/{env_name}/splits", tags=["tasks"])
    async def list_splits(env_name: str) -> list[dict[str, str]]:
        """Splits of a world."""
        kinds = {"train": "train", "eval": "validation", "test": "test"}
        names = world_of(env_name).splits()
        return [{"name": name, "type": kinds.get(name, "validation")} for name in names]

    @router.post("/{env_name}/num_tasks", tags=["tasks"])
    async def num_tasks(env_name: str, body: SplitBody) -> dict[str, int]:
        """How many tasks a split has."""
        return {"num_tasks": count_of(world_of(env_name, body.split), body.split)}

    @router.post("/{env_name}/tasks", tags=["tasks"])
    async def list_tasks(env_name: str, body: SplitBody) -> Frame:
        """All tasks of a split, without their answers."""
        world = world_of(env_name, body.split)
        tasks: list[JsonValue] = [
            world.task(body.split, index) for index in range(count_of(world, body.split))
        ]
        return {"tasks": tasks, "env_name": env_name}

    @router.post("/{env_name}/task", tags=["tasks"])
    async def get_task(env_name: str, body: TaskBody) -> Frame:
        """One task."""
        world = world_of(env_name, body.split)
        if body.index >= count_of(world, body.split):
            raise HTTPException(400, detail="Invalid task index")
        return {"task": world.task(body.split, body.index)}

    @router.post("/{env_name}/task_range", tags=["tasks"])
    async def get_task_range(env_name: str, body: TaskRangeBody) -> Frame:
        """Tasks from start to stop, stop excluded."""
        world = world_of(env_name, body.split)
        count = count_of(world, body.split)
        stop = count if body.stop is None else min(body.stop, count)
        return {"tasks": [world.task(body.split, index) for index in range(body.start, stop)]}


def _add_score(router: APIRouter, episodes: Episodes) -> None:
    @router.post("/score", tags=["score"])
    async def score(body: ScoreRequest) -> ScoreReply:
        """What the job's reward functions say of finished episodes."""
        if not episodes.rewards:
            raise HTTPException(409, detail="the job has no reward functions; its world scores")
        return ScoreReply(
            scores=[
                ScoreAnswer(**dataclasses.asdict(await episodes.score(asked.transcript())))
                for asked in body.episodes
            ]
        )


STATE: Frame = {
    "type": "object",
    "properties": {
        "episode_id": {"type": ["string", "null"]},
        "step_count": {"type": "integer", "minimum": 0},
    },
    "additionalProperties": True,
}

OBSERVATION: Frame = {
    "type": "object",
    "properties": {
        "chat": {
            "type": "array",
            "description": "New messages of this turn.",
            "items": {
                "type": "object",
                "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
            },
        },
        "text": {"type": "string"},
        "info": {"type": "object"},
        "metrics": {"type": "object", "additionalProperties": {"type": "number"}},
        "reward_parts": {"type": "object", "additionalProperties": {"type": "number"}},
        "status": {"type": "string", "enum": ["ok", "truncated", "error"]},
        "reason": {"type": "string"},
    },
    "additionalProperties": True,
}
