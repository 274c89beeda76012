"""Bearer tokens on every route but health. Compared in constant time, never logged."""

import hmac
from collections.abc import Awaitable, Callable

from pydantic import SecretStr
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deltawire.protocol.control import HEALTHZ, READYZ, TOKEN_HEADER, Problem

OPEN_PATHS = frozenset({HEALTHZ, READYZ, "/health"})
"""Content-free: alive or not."""


class TokenAuth:
    """ASGI middleware: 401 (or a refused WebSocket) without the token.

    Accepts `Authorization: Bearer`, or `X-Deltawire-Token` where a private Space's proxy uses the
    former for itself. Without a token configured every call passes; settings then refuse to bind
    anything but loopback.
    """

    def __init__(
        self, app: ASGIApp, *, token: SecretStr | None, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app, self._token, self._open_paths = app, token, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._token is None:
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        # The path that is routed by; a URL made with the Host header could spell another one.
        if scope["path"] in self._open_paths or self._carries_token(connection):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "token missing"})
        else:
            await _unauthorized()(scope, receive, send)

    def _carries_token(self, connection: HTTPConnection) -> bool:
        assert self._token is not None
        expected = self._token.get_secret_value().encode()
        bearer = connection.headers.get("authorization", "")
        offered = [connection.headers.get(TOKEN_HEADER, "")]
        if bearer.lower().startswith("bearer "):
            offered.append(bearer[7:].strip())
        return any(hmac.compare_digest(candidate.encode(), expected) for candidate in offered)


def _unauthorized() -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    problem = Problem(
        type="Unauthorized",
        title="token missing or wrong",
        status=401,
        detail=f"send it as 'Authorization: Bearer …' or '{TOKEN_HEADER}: …'",
    )
    return JSONResponse(
        problem.model_dump(), status_code=401, headers={"WWW-Authenticate": "Bearer"}
    )
