"""One fixture over every store: the contract tests run on each. A missing backend skips at home
and fails under CI=true."""

import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltawire.store.base import Store
from deltawire.store.open import open_store

OpenStore = Callable[[], Store]
"""Opens the same bucket again, as a second process would."""


@pytest.fixture
def local_root(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def need(module: str) -> None:
    """Skip at home, fail in CI, when a package that a backend needs is not installed."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{module} is not installed")
        pytest.skip(f"{module} is not installed")


App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Middleman:
    """In front of moto's S3: one request at a time, because moto checks a condition and writes in
    two steps where S3 does it in one. May drop conditions, refuse, or lose an answer on command.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._one_at_a_time = threading.Lock()
        self.url = ""
        self.behave()

    def behave(self) -> None:
        """Be a plain server again."""
        self.drop_conditions = False
        self.lose_answers = 0
        self.refuse = 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with self._one_at_a_time:
            return list(self._answer(environ, start))

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if self.drop_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
            environ.pop("HTTP_IF_MATCH", None)
        if self.refuse:
            self.refuse -= 1
            start("503 Slow Down", [("Content-Type", "text/plain")])
            return [b""]
        writes = environ["REQUEST_METHOD"] == "PUT" and "probe" not in environ["PATH_INFO"]
        if writes and self.lose_answers:
            self.lose_answers -= 1
            list(self._app(environ, lambda *_: None))
            start("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b""]
        return self._app(environ, start)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Middleman]:
    """A real S3 server over HTTP, without a bucket in it."""
    need("moto.server")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    middleman = Middleman(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, middleman, threaded=True)
    middleman.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield middleman
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def s3_bucket(s3_server: Middleman, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fresh bucket; the AWS variables lead to the server."""
    import boto3

    for variable, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": s3_server.url,
    }.items():
        monkeypatch.setenv(variable, value)
    name = f"bucket-{secrets.token_hex(4)}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    client.close()
    return name


def _open_local(request: pytest.FixtureRequest) -> OpenStore:
    root = request.getfixturevalue("local_root")
    return lambda: open_store(f"file://{root}")


def _open_s3(request: pytest.FixtureRequest) -> OpenStore:
    bucket = request.getfixturevalue("s3_bucket")
    return lambda: open_store(f"s3://{bucket}/some/prefix")


BACKENDS = {"local": _open_local, "s3": _open_s3}


@pytest.fixture(params=BACKENDS)
def open_again(request: pytest.FixtureRequest) -> OpenStore:
    return BACKENDS[request.param](request)


@pytest.fixture
def store(open_again: OpenStore) -> Iterator[Store]:
    opened = open_again()
    yield opened
    opened.close()


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[[bytes], Path]:
    """Makes a source file of these bytes."""
    made: list[Path] = []

    def make(body: bytes) -> Path:
        path = tmp_path / f"source_{len(made)}"
        path.write_bytes(body)
        made.append(path)
        return path

    return make
