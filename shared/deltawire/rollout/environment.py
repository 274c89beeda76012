"""Episodes in environments: the OpenEnv 0.10 WebSocket protocol, over one or many servers.

One socket is one session. Requests and answers carry no id in OpenEnv, so a socket whose answer did
not come in time is dropped, never used again. Our own environment service does give ids: against it
a session survives a cut connection, since an answered request can be asked again.
A server that sleeps (no connection, 5xx, a page for people) is waited for with back-off; a full one
is left alone for a while. Raises EnvironmentFault children only, and TimeoutError at the deadline.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote, urlsplit, urlunsplit

import httpx
from pydantic import JsonValue, SecretStr
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
)

from deltawire.control.client import tls_context, token_headers
from deltawire.protocol.errors import CapacityReached, EnvironmentFault, EpisodeFailed
from deltawire.protocol.rollouts import Task
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.observation import Observation, parse_observation
from deltawire.streams.backoff import backoff_s

SESSION_HEADER = "X-Deltawire-Session"
"""Our service names the session in its handshake: it can be attached to again."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
_HANDSHAKE_S = 10.0
_ANSWER_S = 120.0
"""Longest wait for one answer; worlds with slow tools need minutes."""
_CLOSE_S = 1.0
_FULL_S = 1.0
"""How long a full server is left alone at first."""
_TRY_AGAIN_LATER = 1013
_FINAL_CODES = (1002, 1003, 1007, 1008, 1009)
"""Closed for what we sent, such as a message too large: it would be the same again."""
_DEFAULT_CAPACITY = 64
_MESSAGE_FIELD = "message"


class _Unreachable(Exception):
    """No session now: the server sleeps, starts or is gone. Try again."""


class _Site:
    """One server: how full it is, and whether it is worth asking."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url.rstrip("/"))
        secure = parts.scheme in ("https", "wss")
        self.http_url = urlunsplit(parts._replace(scheme="https" if secure else "http"))
        self.ws_url = urlunsplit(parts._replace(scheme="wss" if secure else "ws")) + "/ws"
        self.action_field: str | None = None
        """The field a message goes into; None until the schema was asked for."""
        self.introduction = asyncio.Lock()
        self.capacity = _DEFAULT_CAPACITY
        self.active = 0
        self.failures = 0
        self.rests_until = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def refused(self, *, first_s: float) -> None:
        """Leave it alone for a while; those who were refused together count once."""
        if time.monotonic() < self.rests_until:
            return
        self.rests_until = time.monotonic() + backoff_s(
            self.failures, first_s=first_s, longest_s=15.0
        )
        self.failures += 1

    async def rested(self) -> None:
        """Return when it may be asked again, or when a session here has ended for this waiter."""
        rest_s = self.rests_until - time.monotonic()
        if rest_s <= 0.0:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait((turn,), timeout=rest_s)
        finally:
            turn.cancel()

    def left(self) -> None:
        """A session ended: there is room for one who waits."""
        self.active -= 1
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def answered(self) -> None:
        self.failures, self.rests_until = 0, 0.0


class EnvironmentClient:
    """Sessions on the emptiest of several servers. One instance serves a whole process."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: SecretStr | None = None,
        headers: Mapping[str, str] | None = None,
        answer_timeout_s: float = _ANSWER_S,
    ) -> None:
        """`headers` replace ours of the same name: a Hub token for a private Space's proxy."""
        self._sites = [_Site(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._sites:
            raise ValueError("an EnvironmentClient needs the URL of at least one environment")
        self._headers = {**token_headers(token), **(headers or {})}
        self._answer_timeout_s = answer_timeout_s

    async def start(
        self, task: Task, *, deadline: Deadline, wait_for_room: bool = True
    ) -> tuple["EnvSession", Observation]:
        """A session with the episode of `task` begun, and its first observation.

        CapacityReached when all servers are full and `wait_for_room` is False; EpisodeFailed when
        the task cannot be begun; EnvironmentFault when we are refused; TimeoutError at the
        deadline.
        """
        while True:
            site = self._emptiest()
            # Counted at once, so that those who choose at the same moment spread out.
            session = EnvSession(
                site, headers=self._headers, answer_timeout_s=self._answer_timeout_s
            )
            try:
                async with contextlib.AsyncExitStack() as undo:
                    undo.push_async_callback(session.close)
                    async with asyncio.timeout(deadline.left_s):
                        await site.rested()
                        observation = await self._begin(session, site, task, deadline)
                    undo.pop_all()
            except _Unreachable:
                site.refused(first_s=0.25)
            except CapacityReached:
                site.refused(first_s=_FULL_S)
                if not wait_for_room and all(s.rests_until > time.monotonic() for s in self._sites):
                    raise
            else:
                site.answered()
                return session, observation

    def _emptiest(self) -> _Site:
        now = time.monotonic()
        return min(
            self._sites,
            key=lambda site: (max(0.0, site.rests_until - now), (site.active + 1) / site.capacity),
        )

    async def _begin(
        self, session: "EnvSession", site: _Site, task: Task, deadline: Deadline
    ) -> Observation:
        async with site.introduction:
            if site.action_field is None:
                await self._get_to_know(site)
        await session.open()
        return await session.reset(task, deadline=deadline)

    async def _get_to_know(self, site: _Site) -> None:
        """Ask a server once what an action looks like, and how many sessions it has."""
        async with httpx.AsyncClient(
            base_url=site.http_url,
            headers=self._headers,
            timeout=_HANDSHAKE_S,
            verify=tls_context(),
        ) as http:
            schema = await _json(http, "/schema")
            capacity = await _json(http, "/capacity")
        site.action_field = _action_field(schema)
        if isinstance(most := capacity.get("max_sessions"), int) and most > 0:
            site.capacity = most


class EnvSession:
    """One episode on one server. Used by one task at a time; `close` it in any case."""

    def __init__(self, site: _Site, *, headers: Mapping[str, str], answer_timeout_s: float) -> None:
        self._site = site
        self._headers = dict(headers)
        self._answer_timeout_s = answer_timeout_s
        self._socket: ClientConnection | None = None
        self._session_id = ""
        self._counted = True
        self.episode_id = uuid.uuid4().hex
        site.active += 1

    @property
    def environment_id(self) -> str:
        """Where the episode runs."""
        return self._site.http_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect; to the session held before, if there was one."""
        url = self._site.ws_url
        if self._session_id:
            url += f"?session_id={quote(self._session_id)}"
        try:
            self._socket = await connect(
                url,
                additional_headers=self._headers,
                open_timeout=_HANDSHAKE_S,
                close_timeout=_CLOSE_S,
                max_size=MAX_FRAME_BYTES,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403):
                raise EnvironmentFault(
                    f"{self.environment_id} refused our token ({status})"
                ) from error
            raise _Unreachable(f"answers {status}") from error
        except (OSError, TimeoutError, InvalidHandshake, InvalidMessage) as error:
            raise _Unreachable(str(error)) from error
        response = self._socket.response
        self._session_id = response.headers.get(SESSION_HEADER, "") if response else ""

    async def reset(self, task: Task, *, deadline: Deadline) -> Observation:
        """Begin an episode; the same task begins the same one."""
        data: dict[str, JsonValue] = {**task.row, "seed": task.seed, "episode_id": self.episode_id}
        data["split"] = task.split
        if task.index is not None:
            data["index"] = task.index
        if task.environment:
            data["environment"] = task.environment
        return parse_observation(await self._ask("reset", data, deadline))

    async def step(self, text: str, *, deadline: Deadline) -> Observation:
        """Say something. EpisodeFailed when the environment cannot go on."""
        action: dict[str, JsonValue] = {self._site.action_field or _MESSAGE_FIELD: text}
        return parse_observation(await self._ask("step", action, deadline))

    async def close(self) -> None:
        """End the session. Never raises, never waits long."""
        socket, self._socket = self._socket, None
        try:
            if socket is not None:
                with contextlib.suppress(ConnectionClosed, OSError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_S):
                        await socket.send(json.dumps({"type": "close"}))
                        await socket.close()
        finally:
            if self._counted:
                self._counted = False
                self._site.left()

    async def _ask(self, kind: str, data: Mapping[str, JsonValue], deadline: Deadline) -> Any:
        """One request and its answer; over a new socket when the old one is cut and can be."""
        request_id = uuid.uuid4().hex if self._session_id else ""
        frame: dict[str, Any] = {"type": kind, "data": data}
        if request_id:
            frame["request_id"] = request_id
        text = json.dumps(frame)
        attempt = 0
        while True:
            try:
                return _result(await self._exchange(text, deadline), request_id=request_id)
            except (ConnectionClosed, _Unreachable) as error:
                self._socket = None
                _judge(error, resumable=bool(request_id), at=self.environment_id)
                async with asyncio.timeout(deadline.left_s):
                    await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    async def _exchange(self, text: str, deadline: Deadline) -> str:
        try:
            async with asyncio.timeout(deadline.within(self._answer_timeout_s)):
                if self._socket is None:
                    await self.open()
                assert self._socket is not None
                with contextlib.suppress(ConnectionClosed):
                    # A server that refuses us says why and closes: that is still to be read.
                    await self._socket.send(text)
                answer = await self._socket.recv()
        except asyncio.CancelledError:
            self._drop_socket()
            raise
        except TimeoutError as error:
            self._drop_socket()
            if deadline.left_s > 0.0:
                raise EpisodeFailed(
                    f"{self.environment_id} gave no answer in {self._answer_timeout_s:.0f} s"
                ) from error
            raise
        return answer if isinstance(answer, str) else answer.decode(errors="replace")

    def _drop_socket(self) -> None:
        """The answer may still come: it must not be taken for that of the next request."""
        if self._socket is not None:
            self._socket.transport.abort()
            self._socket = None


def _judge(error: ConnectionClosed | _Unreachable, *, resumable: bool, at: str) -> None:
    """Return when the request may be repeated; else raise what the cut means."""
    closed_with = error.rcvd.code if isinstance(error, ConnectionClosed) and error.rcvd else None
    if closed_with == _TRY_AGAIN_LATER:
        raise CapacityReached(f"{at} has no free session") from error
    if not resumable or closed_with in _FINAL_CODES:
        raise EpisodeFailed(f"{at} cut the connection: {error}") from error


def _result(text: str, *, request_id: str) -> Any:
    """The data of an observation frame. Raises what an error frame says."""
    try:
        frame = json.loads(text)
        kind, data = frame["type"], frame["data"]
        if not isinstance(data, Mapping):
            raise ValueError("its data is no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EpisodeFailed(f"not a frame of the OpenEnv protocol: {text[:120]!r}") from error
    if kind == "error":
        code, message = data.get("code", ""), data.get("message", "")
        if code == "CAPACITY_REACHED":
            raise CapacityReached(str(message))
        raise EpisodeFailed(f"{code}: {message}")
    if kind != "observation":
        raise EpisodeFailed(f"an observation was expected, a frame of type {kind!r} came")
    if request_id and frame.get("request_id") != request_id:
        raise EpisodeFailed("the answer to another request came")
    return data


async def _json(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """A JSON object, or an empty one where the server has no such route."""
    try:
        response = await http.get(path)
    except httpx.RequestError as error:
        raise _Unreachable(str(error)) from error
    html = response.headers.get("Content-Type", "").startswith("text/html")
    if response.status_code in (401, 403):
        raise EnvironmentFault(f"{http.base_url} refused our token ({response.status_code})")
    if response.status_code >= 500 or html:
        raise _Unreachable(f"answers {response.status_code}")
    try:
        answer = response.json() if response.is_success else {}
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _action_field(schema: Mapping[str, Any]) -> str:
    """`message`, unless the schema has exactly one required field, which is another string."""
    action = schema.get("action")
    if not isinstance(action, Mapping):
        return _MESSAGE_FIELD
    properties, required = action.get("properties") or {}, action.get("required")
    if not isinstance(required, list) or _MESSAGE_FIELD in properties or len(required) != 1:
        return _MESSAGE_FIELD
    return str(required[0])
