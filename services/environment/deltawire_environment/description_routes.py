"""What the service says of itself: health, capacity, metadata, schemas, the job."""

from fastapi import APIRouter, HTTPException

from deltawire.job.resolve import ResolvedJob
from deltawire_environment.client_faults import client_faults
from deltawire_environment.episodes import Episodes
from deltawire_environment.sessions import Frame, Sessions

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


def add_description_routes(
    router: APIRouter, sessions: Sessions, episodes: Episodes, job: ResolvedJob | None
) -> None:
    """GET /health, /capacity, /metadata, /schema, /job."""

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
        with client_faults():
            world = episodes.world(environment)
        return {"action": world.action_schema(), "observation": OBSERVATION, "state": STATE}

    @router.get("/job", tags=["description"])
    async def show_job() -> Frame:
        """The resolved job, for the trainer. 404 without a job file."""
        if job is None:
            raise HTTPException(404, detail="no job file was given (ENVIRONMENT_JOB)")
        shown: Frame = job.spec.model_dump(mode="json")
        return shown
