"""Serve an app until SIGTERM or SIGINT. A taken port is one clear sentence, not a traceback."""

import asyncio
import importlib.util
import json
import logging
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from deltawire.protocol.errors import DeltawireError, SettingsError

log = logging.getLogger(__name__)

_GRACE_S = 3
"""Seconds that open requests get after SIGTERM."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises SettingsError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # whoever reads the port may connect at once; the app answers when up
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port or stop what "
            "uses it"
        ) from error
    return listener


def announce_port(listener: socket.socket, port_file: Path) -> None:
    """Write where a service listens, for whoever started it with port 0."""
    host, port = listener.getsockname()[:2]
    port_file.write_text(json.dumps({"host": host, "port": port}))


class _DrainingServer(uvicorn.Server):
    """Asked to stop once, it first lets the app finish what runs; asked twice, it stops at once."""

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None:
            super().handle_exit(sig, frame)
            return
        self._draining = self._loop.create_task(self._drain_then_exit())
        # A signal does not wake a sleeping loop by itself.
        self._loop.call_soon_threadsafe(lambda: None)

    async def _drain_then_exit(self) -> None:
        try:
            await self._drain()
        except Exception:  # the border to the app: what fails in it must not keep it alive
            log.exception("drain failed")
        finally:
            self.should_exit = True


async def serve(
    app: FastAPI,
    listener: socket.socket,
    *,
    drain: Callable[[], Coroutine[Any, Any, None]] | None = None,
    **uvicorn_options: Any,
) -> None:
    """Run uvicorn on a bound socket until it is told to stop.

    `drain` runs between the first SIGTERM and the end: new work is refused, old work finishes.
    """
    host, port = listener.getsockname()[:2]
    log.info("listening", extra={"host": host, "port": port})
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        ws=_websocket_protocol(),
        **uvicorn_options,
    )
    server = uvicorn.Server(config) if drain is None else _DrainingServer(config, drain)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        # Cancelling uvicorn itself would tear its lifespan and log that as an error.
        server.should_exit = True
        await asyncio.wait({serving}, timeout=_GRACE_S + 1)
        raise


def _websocket_protocol() -> Literal["websockets-sansio", "none"]:
    """Only the environment has WebSocket routes; the other images carry no library for them."""
    return "websockets-sansio" if importlib.util.find_spec("websockets") else "none"


def run_service(main: Coroutine[Any, Any, int]) -> int:
    """Run a service's main coroutine; errors of the tree end it with one line and exit code 2."""
    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        return 130
    except DeltawireError as error:
        log.error("stopped", extra={"error": type(error).__name__, "detail": str(error)})
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
