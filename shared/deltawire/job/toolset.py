"""A class of tools as a world, as TRL's `environment_factory` takes it.

Public methods are tools; `reset(**row)` begins, `get_reward()` judges. The policy calls a tool by
writing `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; a message without a call ends
the episode.
"""

import inspect
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue, ValidationError, create_model, validate_call

from deltawire.job.custom import UserEpisode, UserWorld, as_reply, reset, settled
from deltawire.job.dataset import as_messages
from deltawire.job.rows import Row
from deltawire.job.transcript import Message
from deltawire.job.world import Action, Episode, Reply, Tool, message_of
from deltawire.protocol.errors import JobError
from deltawire.protocol.rollouts import Task

RESERVED = frozenset({"reset", "get_reward", "state", "close", "step"})
"""Public names that are no tools."""

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_MAX_CALLS = 8
"""Calls taken from one message; the rest is refused."""

_INTRODUCTION = (
    "You can call tools. To call one, write its name and arguments as JSON inside "
    '<tool_call></tool_call>, like <tool_call>{"name": "NAME", "arguments": {}}</tool_call>. '
    "Write your answer without a call when you are done.\nTools:\n"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call that the policy wrote. `problem` is set when it could not be read."""

    name: str
    arguments: dict[str, JsonValue]
    problem: str = ""


def is_toolset(kind: type) -> bool:
    """Whether a class has tools and no step."""
    return not callable(getattr(kind, "step", None)) and bool(_tool_names(kind))


def parse_calls(text: str) -> list[Call]:
    """The tool calls in a message, in order."""
    calls = []
    for body in _CALL.findall(text):
        try:
            said = json.loads(body)
            calls.append(Call(str(said["name"]), dict(said.get("arguments") or {})))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            calls.append(Call("", {}, f"the call is not JSON with a name: {error}"))
    return calls


def describe_tools(tools: list[Tool]) -> str:
    """What the system message says of the tools."""
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        )
        for tool in tools
    ]
    return _INTRODUCTION + "\n".join(lines)


class ToolsetWorld(UserWorld):
    """Makes one object of the user's class for each episode and lends its methods as tools."""

    def _check_methods(self) -> None:
        if not callable(getattr(self.kind, "reset", None)):
            raise JobError(f"{self.kind.__name__} has no reset(); an environment class needs one")

    def tools(self) -> list[Tool]:
        return [tool_of(name, getattr(self.kind, name)) for name in _tool_names(self.kind)]

    def tool_action(self, name: str, arguments: Mapping[str, JsonValue]) -> Action:
        call = json.dumps({"name": name, "arguments": dict(arguments)})
        return {"message": f"<tool_call>{call}</tool_call>"}

    async def _start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        row = self.rows.pick(task, rng) if self.rows else dict(task.row)
        game = self.kind(**self.config)
        first = await reset(game, task, rng, row)
        prompt = as_messages(row["prompt"]) if "prompt" in row else []
        chat = [
            Message(role="system", content=describe_tools(self.tools())),
            *prompt,
            *first.messages,
        ]
        return _ToolEpisode(game, row, self), Reply(chat=chat, info=first.info)


class _ToolEpisode(UserEpisode):
    def __init__(self, game: object, row: Row, world: UserWorld) -> None:
        super().__init__(game, row, world)
        self._calls, self._failed = 0, 0

    async def _step(self, action: Action) -> Reply:
        self._turns += 1
        calls = parse_calls(message_of(action))
        results = [await self._run(call) for call in calls[:_MAX_CALLS]]
        self._calls += len(calls)
        self._failed += sum(problem for _, problem in results)
        reply = Reply(
            chat=[Message(role="tool", content=text) for text, _ in results],
            done=not calls,
            metrics={"tool_calls": float(self._calls), "tool_errors": float(self._failed)},
        )
        return await self.finished(reply)

    async def _run(self, call: Call) -> tuple[str, bool]:
        """What the policy reads, and whether the call failed by its own fault."""
        if call.problem:
            return f"Error: {call.problem}", True
        names = _tool_names(type(self.game))
        if call.name not in names:
            return f"Error: no tool {call.name!r}; there are: {', '.join(names)}", True
        method = getattr(self.game, call.name)
        try:
            bound = validate_call(method)
            result = await settled(bound(**call.arguments))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return f"Error: argument {where}: {first['msg']}", True
        except ValueError as error:  # what a tool refuses is for the policy to read
            return f"Error: {error}", True
        return result if isinstance(result, str) else _as_text(result), False


def _as_text(result: object) -> str:
    if isinstance(result, dict | list | int | float | bool) or result is None:
        return json.dumps(result, default=str)
    return as_reply(result).text


def _tool_names(kind: type) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(kind, callable)
        if not name.startswith("_") and name not in RESERVED and inspect.isroutine(value)
    ]


def tool_of(name: str, method: Callable[..., object]) -> Tool:
    """A tool from a method: its docstring, and a JSON schema from its type hints."""
    summary, arguments = _read_docstring(inspect.getdoc(method) or "")
    fields: dict[str, tuple[object, object]] = {}
    for parameter in inspect.signature(method, eval_str=True).parameters.values():
        if parameter.name == "self":
            continue
        kind = object if parameter.annotation is parameter.empty else parameter.annotation
        fields[parameter.name] = (
            kind,
            ... if parameter.default is parameter.empty else parameter.default,
        )
    model = create_model(name, **fields)  # type: ignore[call-overload]
    schema: dict[str, JsonValue] = model.model_json_schema()
    schema.pop("title", None)
    properties = schema.get("properties")
    for argument, shape in properties.items() if isinstance(properties, dict) else ():
        if isinstance(shape, dict):
            shape.pop("title", None)
            if argument in arguments:
                shape["description"] = arguments[argument]
    return Tool(name=name, description=summary, parameters=schema)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """First paragraph, and the `Args:` of a Google-style docstring."""
    summary = text.partition("\n\n")[0]
    _, _, section = ("\n" + text).partition("\nArgs:")
    section = re.split(r"\n(?:Returns|Raises|Yields):", section)[0]
    found = re.findall(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", section, re.MULTILINE)
    return " ".join(summary.split()), {name: said.strip() for name, said in found}
