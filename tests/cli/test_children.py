"""The processes of a run: waited for, named when they die, started again when killed, stopped."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from deltawire.cli.children import Child, ChildDied, stop_all

_SERVICE = """
import http.server, json, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"ready": true}')
    def log_message(self, *words): pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""
_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + (
    "print('deaf', flush=True); time.sleep(60)"
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(tmp_path: Path, code: str) -> Child:
    port = _free_port()
    return Child(
        name="inference-0",
        command=[sys.executable, "-c", code, str(port)],
        environ=dict(os.environ),
        log_path=tmp_path / "child.log",
        url=f"http://127.0.0.1:{port}",
        token=SecretStr("t"),
    )


def _wait_for(child: Child, word: str) -> None:
    while word not in child.tail():
        time.sleep(0.05)


async def test_a_child_is_ready_when_it_answers_and_ends_when_told(tmp_path: Path) -> None:
    child = _child(tmp_path, _SERVICE)
    await child.start()
    await child.wait_ready(20.0)
    assert not await child.revive()
    await stop_all([child])
    assert child.process is not None
    assert child.process.returncode == -signal.SIGTERM


async def test_a_child_that_ends_before_it_is_ready_is_named_with_its_log(tmp_path: Path) -> None:
    child = _child(tmp_path, "import sys; print('no such model: x'); sys.exit(2)")
    await child.start()
    with pytest.raises(ChildDied, match=r"(?s)inference-0 exited with 2.*no such model: x"):
        await child.wait_ready(20.0)


async def test_a_killed_child_is_started_again_a_few_times(tmp_path: Path) -> None:
    child = _child(tmp_path, _SERVICE)
    await child.start()
    await child.wait_ready(20.0)
    for restart in (1, 2, 3):
        assert child.process is not None
        child.process.kill()
        await child.process.wait()
        assert await child.revive()
        assert child.restarts == restart
    child.process.kill()
    await child.process.wait()
    with pytest.raises(ChildDied, match="killed by SIGKILL"):
        await child.revive()


async def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.cli.children._STOP_S", 0.3)
    child = _child(tmp_path, _DEAF)
    await child.start()
    await asyncio.to_thread(_wait_for, child, "deaf")
    await stop_all([child])
    assert child.process is not None
    assert child.process.returncode == -signal.SIGKILL
