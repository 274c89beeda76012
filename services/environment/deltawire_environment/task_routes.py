"""OpenEnv's task routes: which worlds, splits and tasks there are. Never an answer."""

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, Field, JsonValue

from deltawire.job.world import World
from deltawire_environment.episodes import Episodes
from deltawire_environment.sessions import Frame


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


def add_task_routes(router: APIRouter, episodes: Episodes) -> None:
    """GET /list_environments, /{env}/splits; POST /{env}/num_tasks, /tasks, /task, /task_range."""

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
