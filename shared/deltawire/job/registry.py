"""Find a world: by name among the installed ones, or from what a job file holds.

Worlds are entry points of the group `deltawire.worlds`, so any installed package can offer one.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points

from pydantic import JsonValue, ValidationError

from deltawire.job.custom import UserWorld
from deltawire.job.dataset import DatasetConfig, DatasetWorld
from deltawire.job.job import WorldLike
from deltawire.job.rows import Rows
from deltawire.job.suggestion import nearest, unknown
from deltawire.job.toolset import ToolsetWorld, is_toolset
from deltawire.job.world import ENV_NAMES, World, WorldConfig
from deltawire.protocol.errors import JobError

WORLD_GROUP = "deltawire.worlds"


def installed_worlds() -> list[str]:
    """Names of the worlds that installed packages offer."""
    return sorted({point.name for point in entry_points(group=WORLD_GROUP)})


def world_name(world: WorldLike | None) -> str:
    """What a world is called in specs, tickets and logs."""
    if world is None:
        return DatasetWorld.name
    if isinstance(world, str):
        return world
    return world.__name__.lower() if isinstance(world, type) else world.name


def make_world(
    world: WorldLike | None,
    config: Mapping[str, JsonValue],
    *,
    max_turns: int | None = None,
    rows: Rows | None = None,
) -> World:
    """The world, made with its arguments. Raises JobError naming what is wrong with them.

    `family:variant` names (`reasoning:countdown`) pass the variant as the argument `variant`. A
    world that counts turns gets the job's `max_turns` unless its own argument says otherwise.
    """
    if isinstance(world, World):
        return world
    if isinstance(world, type) and not issubclass(world, World):
        adapter = ToolsetWorld if is_toolset(world) else UserWorld
        return adapter(world, config=config, max_turns=max_turns, rows=rows)
    if world is None:
        assert rows is not None
        return DatasetWorld(DatasetConfig.model_validate(_config(DatasetWorld, config)), rows)
    arguments = dict(config)
    if isinstance(world, str):
        family, _, variant = world.partition(":")
        if variant:
            arguments["variant"] = variant
        made = _installed(family)
    else:
        made = world
    if max_turns is not None and "max_turns" in made.Config.model_fields:
        arguments.setdefault("max_turns", max_turns)
    return made(_config(made, arguments))  # type: ignore[call-arg]


def _config(world: type[World], arguments: Mapping[str, JsonValue]) -> WorldConfig:
    try:
        return world.Config.model_validate(arguments)
    except ValidationError as error:
        raise JobError(_explain(world, error)) from None


def _installed(name: str) -> type[World]:
    for point in entry_points(group=WORLD_GROUP):
        if point.name == name:
            found = point.load()
            assert isinstance(found, type)
            assert issubclass(found, World)
            return found
    names = installed_worlds()
    if not names:
        raise JobError(f"world {name!r} is not known: no world is installed in this Python")
    raise JobError(unknown("world", name, names))


def _explain(world: type[World], error: ValidationError) -> str:
    lines, name = [], world.name
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            guess = nearest(where, [*world.Config.model_fields, *ENV_NAMES])
            hint = f"; did you mean {guess!r}?" if guess else ""
            lines.append(f"the world {name!r} takes no argument {where!r}{hint}")
        else:
            lines.append(f"argument {where!r} of the world {name!r}: {item['msg']}")
    return "; ".join(lines)
