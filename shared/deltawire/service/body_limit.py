"""An HTTP body over the limit is refused, whatever its length claims."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltawire.protocol.errors import PayloadTooLarge
from deltawire.service.problems import problem_of


class BodyLimit:
    """ASGI middleware: 413 for a length that is too large; a body that lies is cut off."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int) -> None:
        self._app, self._limit_bytes = app, limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        claimed = Headers(scope=scope).get("content-length", "0")
        if claimed.isdecimal() and int(claimed) > self._limit_bytes:
            problem = problem_of(self._too_large())
            await JSONResponse(problem.model_dump(), problem.status)(scope, receive, send)
            return
        read_bytes = 0

        async def limited() -> Message:
            nonlocal read_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            if read_bytes > self._limit_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"a body may hold {self._limit_bytes} bytes")
