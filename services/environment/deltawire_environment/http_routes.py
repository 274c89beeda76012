"""The HTTP side of the service: play, descriptions, tasks, MCP and scores."""

import dataclasses
import json

from fastapi import APIRouter, HTTPException, Request

from deltawire.job.resolve import ResolvedJob
from deltawire.job.score_messages import ScoreAnswer, ScoreReply, ScoreRequest
from deltawire_environment.description_routes import add_description_routes
from deltawire_environment.episodes import Episodes
from deltawire_environment.mcp import McpDesk
from deltawire_environment.play_routes import add_play_routes
from deltawire_environment.sessions import Frame, Sessions
from deltawire_environment.task_routes import add_task_routes


def environment_routes(
    *, sessions: Sessions, episodes: Episodes, mcp: McpDesk, job: ResolvedJob | None
) -> APIRouter:
    """All routes but the sockets."""
    router = APIRouter()
    add_play_routes(router, sessions, episodes)
    add_description_routes(router, sessions, episodes, job)
    add_task_routes(router, episodes)
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
