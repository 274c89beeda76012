"""The supervisor of a vLLM child: nothing waits for a server that is gone or says it is."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from deltawire.protocol.errors import EngineError
from deltawire_inference.engines.vllm.child import VllmChild
from deltawire_inference.engines.vllm.client import VllmClient

SERVER = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer

path, orphan_file, ending = sys.argv[1:]

class Handler(BaseHTTPRequestHandler):
    def address_string(self):
        return "test"

    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_GET(self):
        self.answer(503 if os.path.exists(orphan_file) and ending == "says it" else 200)

    def do_POST(self):
        os.set_inheritable(self.connection.fileno(), True)  # as a forked rank would hold it
        orphan = subprocess.Popen(["sleep", "600"], close_fds=False)
        open(orphan_file, "w").write(str(orphan.pid))
        if ending == "ends":
            os._exit(1)

UnixStreamServer.address_family = 1
with UnixStreamServer(path, Handler) as server:
    server.serve_forever()
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  (other processes set no event)
            await asyncio.sleep(0.05)


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[VllmChild]:
    made = VllmChild(socket=tmp_path / "vllm.sock", memory=tmp_path / "memory")
    yield made
    await made.stop()


async def call(work: Awaitable[object]) -> None:
    with pytest.raises(EngineError):
        await work


@pytest.mark.parametrize("ending", ["ends", "says it"])
async def test_when_the_server_is_gone_its_group_is_ended_and_waiting_calls_fail(
    child: VllmChild, tmp_path: Path, ending: str
) -> None:
    """A rank that lives on holds the connection open: without its end the call would wait on."""
    script, orphan_file = tmp_path / "server.py", tmp_path / "orphan"
    script.write_text(SERVER)
    socket = tmp_path / "vllm.sock"
    client = VllmClient(socket)
    command = [sys.executable, str(script), str(socket), str(orphan_file), ending]
    await child.start(command, {}, client, timeout_s=120)
    waiting = asyncio.create_task(call(client.generate({})))
    await until(orphan_file.exists)

    await until(lambda: not child.alive)
    async with asyncio.timeout(120):
        await waiting
    orphan = Path("/proc") / orphan_file.read_text()
    await until(lambda: not orphan.exists() or ") Z " in (orphan / "stat").read_text())
    await child.stop()
    assert not (tmp_path / "vllm.pgid").exists()
    await client.close()
