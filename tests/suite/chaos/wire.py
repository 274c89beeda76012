"""A TCP proxy between two parties that can be told to fail as networks do."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Literal

from .witness import Conversation, Witness

Cut = Literal["drop", "delay", "stall", "half_close"]
"""drop: connections are reset and new ones too. delay: each piece waits. stall: nothing passes, as
if packets were lost, and all of it arrives afterwards. half_close: what is asked passes, answers
are lost and the asker sees the end of the connection."""
CUTS: tuple[Cut, ...] = ("drop", "delay", "stall", "half_close")

_PIECE_BYTES = 64 * 1024
_LONGEST_DELAY_S = 0.4


class Wire:
    """One link. `port_of` tells where the other end listens now."""

    def __init__(
        self,
        name: str,
        port_of: Callable[[], int],
        *,
        rng: random.Random,
        witness: Witness | None = None,
    ) -> None:
        self.name, self.port = name, 0
        self.witness = witness or Witness()
        self._hears_redis = witness is not None
        self._port_of, self._rng = port_of, rng
        self._cut: Cut | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and end every connection."""
        assert self._server is not None
        self._server.close()
        self._flows.set()
        for connection in list(self._connections):
            connection.abort()
        while self._connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    @contextlib.contextmanager
    def cut(self, kind: Cut) -> Iterator[None]:
        """Fail in one way for as long as the block lasts."""
        self._cut = kind
        if kind == "stall":
            self._flows.clear()
        for connection in list(self._connections):
            if kind == "drop":
                connection.abort()
            elif kind == "half_close":
                connection.turn_deaf()
        try:
            yield
        finally:
            self._cut = None
            self._flows.set()
            for connection in list(self._connections):
                if connection.deaf:
                    connection.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut == "drop":
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port_of())
        except OSError:
            writer.transport.abort()
            return
        heard = self.witness.listen() if self._hears_redis else None
        connection = _Connection(writer, far_writer, heard)
        self._connections.add(connection)
        if self._cut == "half_close":
            connection.turn_deaf()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, connection, asks=True))
                group.create_task(self._pump(far_reader, connection, asks=False))
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def _pump(
        self, reader: asyncio.StreamReader, connection: "_Connection", *, asks: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                if not asks:
                    connection.note(piece, asks=False)
                await self._flows.wait()
                if self._cut == "delay":
                    await asyncio.sleep(self._rng.uniform(0.05, _LONGEST_DELAY_S))
                if asks:
                    connection.note(piece, asks=True)
                await connection.pass_on(piece, asks=asks)
        await connection.end(asks=asks)


class _Connection:
    """A pair of sockets."""

    def __init__(
        self,
        near: asyncio.StreamWriter,
        far: asyncio.StreamWriter,
        heard: Conversation | None,
    ) -> None:
        self._near, self._far, self._heard = near, far, heard
        self.deaf = False

    def note(self, piece: bytes, *, asks: bool) -> None:
        """Let the witness hear it."""
        if self._heard is not None:
            if asks:
                self._heard.asked(piece)
            else:
                self._heard.answered(piece)

    async def pass_on(self, piece: bytes, *, asks: bool) -> None:
        """Write to the other side; answers to the deaf are lost."""
        if asks:
            self._far.write(piece)
            await self._far.drain()
        elif not self.deaf:
            self._near.write(piece)
            await self._near.drain()

    async def end(self, *, asks: bool) -> None:
        """One direction has ended: say so to the other side."""
        with contextlib.suppress(OSError):
            if asks:
                self._far.write_eof()
            elif not self.deaf:
                self._near.write_eof()

    def turn_deaf(self) -> None:
        """End the direction of the answers."""
        if not self.deaf:
            self.deaf = True
            with contextlib.suppress(OSError):
                self._near.write_eof()

    def abort(self) -> None:
        """Reset both sockets."""
        self._near.transport.abort()
        self._far.transport.abort()
