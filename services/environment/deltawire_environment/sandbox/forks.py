"""The service's end of the fork server: start it, order children, hear how they ended."""

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from deltawire.protocol.errors import EpisodeFailed
from deltawire_environment.sandbox.server import MESSAGE_BYTES

_START_S = 20.0


@dataclass(slots=True, eq=False)
class Child:
    """A confined process that waits for its program."""

    id: int
    talk: socket.socket
    """Takes the program, gives the results."""
    output: socket.socket
    """What the program prints."""
    ended: asyncio.Future[int]
    """Its exit code, negative for a signal."""

    def close(self) -> None:
        """Our ends of its sockets."""
        self.talk.close()
        self.output.close()


class Forks:
    """One running fork server."""

    def __init__(
        self,
        server: subprocess.Popen[bytes],
        control: socket.socket,
        *,
        root: str,
        private: bool,
        memory_bytes: int,
        cpu_s: int,
    ) -> None:
        self.private = private
        """Whether children have a scratch folder of their own."""
        self._server, self._control, self._root = server, control, root
        self._limits = {"memory_bytes": memory_bytes, "cpu_s": cpu_s}
        self._ids = itertools.count()
        self._children: dict[int, Child] = {}
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, *, mode: str, memory_bytes: int, cpu_s: int) -> "Forks":
        """Start a server and wait for its hello. Raises EpisodeFailed when there is none."""
        root = await asyncio.to_thread(tempfile.mkdtemp, prefix="deltawire-sandbox-")
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        fd = theirs.fileno()
        server = await asyncio.to_thread(_start_server, fd, root, mode)
        theirs.close()
        hello = b""
        try:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_START_S):
                    hello = await asyncio.get_running_loop().sock_recv(control, MESSAGE_BYTES)
            if not hello:
                raise EpisodeFailed("the sandbox server did not start; see the service's log")
        except BaseException:
            control.close()
            server.kill()
            server.wait()
            shutil.rmtree(root, ignore_errors=True)
            raise
        private = bool(json.loads(hello)["private"])
        return cls(
            server, control, root=root, private=private, memory_bytes=memory_bytes, cpu_s=cpu_s
        )

    @property
    def alive(self) -> bool:
        """Whether the server still takes orders."""
        return self._server.poll() is None and not self._listener.done()

    def fork(self) -> Child:
        """A new child. Raises EpisodeFailed when the server takes no more orders."""
        talk, their_talk = socket.socketpair()
        output, their_output = socket.socketpair()
        talk.setblocking(False)
        output.setblocking(False)
        child = Child(next(self._ids), talk, output, asyncio.get_running_loop().create_future())
        order = json.dumps({"fork": child.id, **self._limits}).encode()
        try:
            socket.send_fds(self._control, [order], [their_talk.fileno(), their_output.fileno()])
        except OSError as error:
            child.close()
            raise EpisodeFailed(f"the sandbox server takes no more orders: {error}") from error
        finally:
            their_talk.close()
            their_output.close()
        self._children[child.id] = child
        return child

    def kill(self, child: Child) -> None:
        """End a child now. Harmless when it has ended."""
        if not child.ended.done():
            with contextlib.suppress(OSError):  # the server is gone, and its children with it
                self._control.send(json.dumps({"kill": child.id}).encode())

    def close(self) -> None:
        """End the server; as process 1 of its namespace it takes every child with it."""
        self._listener.cancel()
        with contextlib.suppress(RuntimeError):  # no loop any more: nothing to forget
            asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._server.kill()
        self._server.wait()
        shutil.rmtree(self._root, ignore_errors=True)
        self._all_ended()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while message := await loop.sock_recv(self._control, MESSAGE_BYTES):
                said = json.loads(message)
                child = self._children.pop(said["ended"], None)
                if child is not None and not child.ended.done():
                    child.ended.set_result(said["status"])
        self._all_ended()

    def _all_ended(self) -> None:
        for child in self._children.values():
            if not child.ended.done():
                child.ended.set_result(-signal.SIGKILL)
        self._children.clear()


def _start_server(fd: int, root: str, mode: str) -> subprocess.Popen[bytes]:
    module = "deltawire_environment.sandbox.server"
    return subprocess.Popen(
        [sys.executable, "-I", "-m", module, str(fd), root, mode],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        env={},  # no secret of ours is in there to be found
        cwd="/",
    )
