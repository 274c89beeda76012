"""WS /ws: one socket, one session, one request at a time."""

import asyncio
import json
import logging
from collections.abc import Callable

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from deltawire.job.world import BadAction
from deltawire.protocol.errors import CapacityReached, DeltawireError
from deltawire_environment.episodes import Episodes, task_of
from deltawire_environment.frames import (
    FrameError,
    Request,
    error_frame,
    fault_frame,
    observation_frame,
    parse,
    validation_frame,
)
from deltawire_environment.mcp import McpDesk
from deltawire_environment.sessions import Frame, Session, Sessions

log = logging.getLogger(__name__)

SESSION_HEADER = "X-Deltawire-Session"
"""Answers the handshake with the session's id, so that a cut client can attach again."""

REPLACED = 4001
"""Close code for a socket whose client has attached again elsewhere."""


class SocketDesk:
    """Serves sockets."""

    def __init__(self, *, sessions: Sessions, episodes: Episodes, mcp: McpDesk) -> None:
        self._sessions, self._episodes, self._mcp = sessions, episodes, mcp
        self._closing: set[asyncio.Task[None]] = set()

    async def serve(self, socket: WebSocket) -> None:
        """Attach the socket to a new session, or to `?session_id=`, and answer until it closes."""
        try:
            session = self._session_of(socket)
        except DeltawireError as error:
            await socket.accept()
            await self._refuse(socket, error)
            return
        attachment = self._sessions.attach(session, self._closer(socket))
        try:
            await socket.accept(headers=[(SESSION_HEADER.lower().encode(), session.id.encode())])
            await self._converse(socket, session, attachment)
        except WebSocketDisconnect:
            pass  # the client went without a word, or was told to
        finally:
            self._sessions.detach(session, attachment)
        if socket.application_state is not WebSocketState.DISCONNECTED:
            await _close(socket, 1000)

    def _session_of(self, socket: WebSocket) -> Session:
        wanted = socket.query_params.get("session_id")
        if wanted:
            return self._sessions.find(wanted)
        return self._sessions.open(owned_by_socket=True)

    async def _refuse(self, socket: WebSocket, error: DeltawireError) -> None:
        more = {}
        if isinstance(error, CapacityReached):
            more = {"active_sessions": len(self._sessions), "max_sessions": self._sessions.limit}
        await _send(socket, fault_frame(error, **more))
        await _close(socket, 1013 if more else 1008)

    async def _converse(self, socket: WebSocket, session: Session, attachment: int) -> None:
        while session.attachment == attachment and not session.closed:
            try:
                request = parse(await _receive(socket))
            except FrameError as error:
                await _send(socket, error.frame)
                continue
            if request.type == "close":
                session.resumable = False
                return
            frame = await self._answer(session, request)
            await _send(socket, frame)

    async def _answer(self, session: Session, request: Request) -> Frame:
        async with session.lock:
            self._sessions.touch(session)
            key = request.request_id
            if key is not None and key in session.answers:
                return session.answers[key]
            frame = await self._act(session, request)
            self._sessions.touch(session)
            if key is not None:
                session.resumable = True
                frame = {**frame, "request_id": key}
                session.remember(key, frame)
            return frame

    async def _act(self, session: Session, request: Request) -> Frame:
        try:
            match request.type:
                case "reset":
                    task = task_of(request.data)
                    episode_id = request.data.get("episode_id")
                    reply = await self._episodes.start(
                        session, task, episode_id=str(episode_id) if episode_id else None
                    )
                    return observation_frame(reply)
                case "step":
                    return observation_frame(await self._episodes.step(session, request.data))
                case "mcp":
                    answer = await self._mcp.answer(request.data, session=session)
                    return {"type": "mcp", "data": answer}
                case _:
                    return {"type": "state", "data": session.state()}
        except ValidationError as error:
            return validation_frame(error)
        except (BadAction, DeltawireError) as error:
            return fault_frame(error)

    def _closer(self, socket: WebSocket) -> Callable[[], None]:
        def close() -> None:
            task = asyncio.create_task(_close(socket, REPLACED))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        return close


async def _receive(socket: WebSocket) -> str:
    """The next text frame. A binary one is no protocol of ours."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1006)
    text = message.get("text")
    if text is None:
        raise FrameError(error_frame("INVALID_JSON", "send text frames, not binary ones"))
    return str(text)


async def _send(socket: WebSocket, frame: Frame) -> None:
    try:
        await socket.send_text(json.dumps(frame))
    except RuntimeError:  # closed by us meanwhile: the client attached again elsewhere
        raise WebSocketDisconnect(REPLACED) from None


async def _close(socket: WebSocket, code: int) -> None:
    try:
        await socket.close(code)
    except (RuntimeError, WebSocketDisconnect, OSError):
        return  # already closed by the other side
