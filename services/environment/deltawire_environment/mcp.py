"""MCP over JSON-RPC 2.0: a world's tools for clients that speak it, and OpenEnv's session calls."""

import contextlib
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, JsonValue, ValidationError

from deltawire.job.suggestion import unknown
from deltawire.job.world import BadAction, Reply, World
from deltawire.protocol.errors import CapacityReached, DeltawireError
from deltawire.protocol.rollouts import Task
from deltawire.protocol.wire_model import WireModel
from deltawire_environment.episodes import Episodes
from deltawire_environment.sessions import Frame, Session, Sessions

INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32600, -32601, -32602
INTERNAL_ERROR, SERVER_ERROR = -32603, -32000

_PROTOCOL_VERSION = "2025-06-18"


class RpcRequest(WireModel):
    """A JSON-RPC request; without an id it is a notification."""

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, JsonValue] = Field(default_factory=dict)
    id: str | int | None = None


class RpcFault(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str, **data: JsonValue) -> None:
        super().__init__(message)
        self.body: Frame = {"code": code, "message": message, **({"data": data} if data else {})}


class McpDesk:
    """Answers JSON-RPC requests, alone or for an attached session."""

    def __init__(self, *, sessions: Sessions, episodes: Episodes) -> None:
        self._sessions, self._episodes = sessions, episodes

    async def answer(self, message: JsonValue, *, session: Session | None = None) -> Frame:
        """The response to one request. Never raises: faults are JSON-RPC errors. Whoever attached
        `session` holds its lock."""
        request_id: str | int | None = None
        try:
            request = RpcRequest.model_validate(message)
            request_id = request.id
            result = await self._result(request, session)
            return {"jsonrpc": "2.0", "id": request_id, "result": result}
        except ValidationError as error:
            fault = RpcFault(
                INVALID_REQUEST, f"invalid request: {error.error_count()} wrong fields"
            )
        except RpcFault as error:
            fault = error
        except BadAction as error:
            fault = RpcFault(INVALID_PARAMS, str(error))
        except CapacityReached as error:
            taken, limit = len(self._sessions), self._sessions.limit
            fault = RpcFault(SERVER_ERROR, str(error), active_sessions=taken, max_sessions=limit)
        except DeltawireError as error:
            fault = RpcFault(INTERNAL_ERROR, str(error))
        return {"jsonrpc": "2.0", "id": request_id, "error": fault.body}

    async def _result(self, request: RpcRequest, session: Session | None) -> JsonValue:
        match request.method:
            case "initialize":
                return {
                    "protocolVersion": _PROTOCOL_VERSION,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "deltawire-environment", "version": "0.1.0"},
                }
            case "ping" | "notifications/initialized":
                return {}
            case "openenv/session/create":
                made = session or self._sessions.open(owned_by_socket=False)
                return {"session_id": made.id}
            case "openenv/session/close":
                return self._close(request.params)
            case "tools/list":
                world = self._session(request.params, session)
                return {"tools": _listed((world and world.world) or self._episodes.world())}
            case "tools/call":
                if session is not None:
                    return await self._call(request.params, session)
                found = self._session(request.params, None)
                async with found.lock if found is not None else contextlib.nullcontext():
                    return await self._call(request.params, found)
        raise RpcFault(METHOD_NOT_FOUND, f"no method {request.method[:64]!r}")

    def _session(self, params: Mapping[str, JsonValue], session: Session | None) -> Session | None:
        wanted = params.get("session_id")
        if session is not None or not isinstance(wanted, str):
            return session
        try:
            return self._sessions.find(wanted)
        except DeltawireError as error:
            raise RpcFault(INVALID_PARAMS, str(error)) from None

    def _close(self, params: Mapping[str, JsonValue]) -> Frame:
        session = self._session(params, None)
        if session is None:
            raise RpcFault(INVALID_PARAMS, "'session_id' is required")
        if session.attached:
            raise RpcFault(INVALID_REQUEST, "a socket holds this session; close the socket first")
        self._sessions.close(session)
        return {"session_id": session.id, "closed": True}

    async def _call(self, params: Mapping[str, JsonValue], session: Session | None) -> Frame:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise RpcFault(INVALID_PARAMS, "a call has a 'name' and an object of 'arguments'")
        lent = session or self._sessions.open(owned_by_socket=False)
        try:
            if lent.episode is None:
                await self._episodes.start(lent, Task(), episode_id=None)
            reply = await self._episodes.step(lent, tool_action(lent.world, name, arguments))
        finally:
            if session is None:
                self._sessions.close(lent)
        return {
            "content": [{"type": "text", "text": spoken(reply)}],
            "structuredContent": {"reward": reply.reward, "done": reply.done},
            "data": spoken(reply),
            "isError": False,
        }


def tool_action(
    world: World | None, name: str, arguments: Mapping[str, JsonValue]
) -> Mapping[str, JsonValue]:
    """The action that a tool call means in a world. Raises BadAction for an unknown tool."""
    if world is None:
        raise BadAction("no episode has been started; send a reset first")
    names = [tool.name for tool in world.tools()]
    if name not in names:
        raise BadAction(unknown("tool", name, names))
    return world.tool_action(name, arguments)


def spoken(reply: Reply) -> str:
    """What a policy would read of a reply, as one text."""
    return "\n".join(message["content"] for message in reply.messages)


def _listed(world: World) -> list[JsonValue]:
    return [
        {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
        for tool in world.tools()
    ]
