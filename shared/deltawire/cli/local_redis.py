"""The Redis of a run on one machine: started first, stopped last, started again when it dies."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltawire.cli.children import end_with_launcher
from deltawire.streams.local_server import LocalServer, start


class LocalRedis:
    """A server that keeps its folder, port and password over restarts: nothing acked is lost."""

    def __init__(self, folder: Path) -> None:
        self._server: LocalServer = start(folder, in_child=end_with_launcher)
        self.name = "redis"
        self.log_path = folder / "redis.log"
        self.restarts = 0

    @property
    def url(self) -> str:
        """With the password: a secret."""
        return self._server.url

    def revive(self) -> bool:
        """Start again when it died; False while it is alive."""
        if self._server.process.poll() is None:
            return False
        dead = self._server
        self._server = start(
            dead.folder,
            port=dead.port,
            password=dead.password.get_secret_value(),
            in_child=end_with_launcher,
        )
        self.restarts += 1
        return True

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        self._server.stop()


@contextmanager
def local_redis(folder: Path) -> Iterator[LocalRedis]:
    """A Redis for the length of the block. Raises StreamUnavailable when none can be started."""
    server = LocalRedis(folder)
    try:
        yield server
    finally:
        server.stop()
