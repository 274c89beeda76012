"""A user's own class as a world: `reset` and `step`, nothing to inherit from.

    class Countdown:
        def reset(self, *, seed: int) -> str: ...
        def step(self, message: str) -> str | Reply | tuple[str, float, bool]: ...

One object plays one episode. `get_reward()`, `state()` and `close()` are used when they exist.
A class of plain methods may block: it runs in threads. One with an async method runs on the event
loop and must not block.
"""

import dataclasses
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue

from deltawire.job.dataset import as_messages
from deltawire.job.rows import Row, Rows
from deltawire.job.suggestion import unknown
from deltawire.job.transcript import Message
from deltawire.job.world import (
    ENV_NAMES,
    Action,
    BadAction,
    Episode,
    Reply,
    World,
    message_of,
)
from deltawire.protocol.errors import JobError
from deltawire.protocol.rollouts import Task

Value = TypeVar("Value")

DEFAULT_TURNS = 10
"""Of a class that ends its episodes itself, when the job does not say."""

_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_REPLY_FIELDS = {field.name for field in dataclasses.fields(Reply)}


class UserWorld(World):
    """Makes one object of the user's class for each episode."""

    def __init__(
        self,
        kind: type,
        *,
        config: Mapping[str, JsonValue],
        max_turns: int | None,
        rows: Rows | None = None,
    ) -> None:
        """Raises JobError for a missing method or an argument the class does not take."""
        self.name = kind.__name__.lower()
        self.description = inspect.getdoc(kind) or ""
        self.kind, self.config, self.rows = kind, dict(config), rows
        self.max_turns = max_turns or DEFAULT_TURNS
        self.blocking = not any(map(inspect.iscoroutinefunction, vars_of(kind)))
        self._check_methods()
        parameters = inspect.signature(kind).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        for argument in self.config:
            if argument not in parameters and not takes_any:
                known = [*parameters, *ENV_NAMES]
                raise JobError(unknown(f"argument of {kind.__name__}", argument, known))

    def _check_methods(self) -> None:
        for method in ("reset", "step"):
            if not callable(getattr(self.kind, method, None)):
                raise JobError(
                    f"{self.kind.__name__} has no {method}(); an environment class has reset() "
                    "and step(message), or reset() and methods that are tools"
                )

    def start(
        self, task: Task, rng: random.Random
    ) -> tuple[Episode, Reply] | Awaitable[tuple[Episode, Reply]]:
        return self._at_once(self._start(task, rng))

    def _at_once(self, work: Coroutine[Any, Any, Value]) -> Value | Awaitable[Value]:
        return run_through(work) if self.blocking else work

    async def _start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        row = self.rows.pick(task, rng) if self.rows else dict(task.row)
        game = self.kind(**self.config)
        first = await reset(game, task, rng, row)
        if not first.messages and "prompt" in row:
            first = dataclasses.replace(first, chat=as_messages(row["prompt"]))
        return UserEpisode(game, row, self), first

    def splits(self) -> list[str]:
        return self.rows.names() if self.rows else super().splits()

    def task_count(self, split: str) -> int | None:
        return self.rows.count(split) if self.rows else None


class UserEpisode(Episode):
    """One object of the user's class."""

    def __init__(self, game: object, row: Row, world: UserWorld) -> None:
        self.game, self.row = game, row
        self._world = world
        self._turns = 0

    def step(self, action: Action) -> Reply | Awaitable[Reply]:
        return self._world._at_once(self._step(action))

    async def _step(self, action: Action) -> Reply:
        self._turns += 1
        reply = as_reply(await settled(self.game.step(message_of(action))))  # type: ignore[attr-defined]
        return await self.finished(reply)

    async def finished(self, reply: Reply) -> Reply:
        """End at the turn limit, and ask `get_reward()` when the reply gave no reward."""
        if self._turns >= self._world.max_turns:
            reply = dataclasses.replace(reply, done=True)
        ask = getattr(self.game, "get_reward", None)
        if reply.done and reply.reward is None and callable(ask):
            reply = dataclasses.replace(reply, reward=as_number(await settled(ask())))
        return reply

    def state(self) -> dict[str, JsonValue]:
        show = getattr(self.game, "state", None)
        shown = show() if callable(show) else {}
        return dict(shown) if isinstance(shown, Mapping) else {}

    def close(self) -> Awaitable[None] | None:
        shut = getattr(self.game, "close", None)
        answer = shut() if callable(shut) else None
        return answer if isinstance(answer, Awaitable) else None


async def reset(game: object, task: Task, rng: random.Random, row: Row) -> Reply:
    """Call the user's reset with those of seed, split, index, rng and the row that it names.

    Raises BadAction when it needs an argument that neither the data set nor the client gives.
    """
    method: Callable[..., object] = game.reset  # type: ignore[attr-defined]
    offered: dict[str, object] = {
        "seed": task.seed,
        "split": task.split,
        "index": task.index,
        "rng": rng,
        **row,
    }
    parameters = inspect.signature(method).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        named = {**row, **{name: offered[name] for name in parameters if name in offered}}
    else:
        named = {name: value for name, value in offered.items() if name in parameters}
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in _OPEN]
    if missing := [name for name in needed if name not in named]:
        raise BadAction(
            f"{type(game).__name__}.reset needs {', '.join(map(repr, missing))}, which neither the "
            "data set nor the request gives"
        )
    return as_reply(await settled(method(**named)))


def run_through(work: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine that awaits nothing, in the thread we are in."""
    try:
        work.send(None)
    except StopIteration as end:
        result: Value = end.value
        return result
    work.close()
    raise TypeError("a plain method returned an awaitable; make the method itself `async def`")


def vars_of(kind: type) -> list[object]:
    """The functions of a class, inherited ones too."""
    return [value for _, value in inspect.getmembers(kind, inspect.isfunction)]


async def settled(value: object) -> object:
    """The value, or what an async method's awaitable gives."""
    return await value if isinstance(value, Awaitable) else value


def as_reply(value: object) -> Reply:
    """What a user's method returned, as a Reply.

    A string is the next user message; `(text, reward, done)` a full answer; a list of messages or
    a dict of Reply's fields work as well. Raises TypeError for anything else.
    """
    match value:
        case Reply():
            return value
        case None:
            return Reply()
        case str():
            return Reply(text=value)
        case (str(text), None | int() | float() as reward, bool(done)):
            return Reply(text=text, reward=None if reward is None else float(reward), done=done)
        case list():
            return Reply(chat=[Message(role=m["role"], content=m["content"]) for m in value])
        case dict():
            for name in value:
                if name not in _REPLY_FIELDS:
                    raise TypeError(unknown("field of a reply", str(name), _REPLY_FIELDS))
            return Reply(**value)
    raise TypeError(
        f"reset and step return text, a Reply or (text, reward, done), not {type(value).__name__}"
    )


def as_number(value: object) -> float:
    """A reward as a number. Raises TypeError for anything else."""
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"get_reward returned {type(value).__name__}, not a number")


def open_rows(dataset: object, folder: Path) -> Rows | None:
    """The rows of a job's data set, when it has one."""
    return None if dataset is None else Rows(dataset, folder=folder)
