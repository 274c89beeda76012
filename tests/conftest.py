"""Buckets on this machine that more than one room's tests use: a real S3 server, a small Hub.

A missing backend skips at home and fails under CI=true.
"""

import importlib.util
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest


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


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[Any]:
    """A Hub on this machine (fake_hub.py), for the real client."""
    need("huggingface_hub")
    need("hf_xet")
    spec = importlib.util.spec_from_file_location(
        "fake_hub", Path(__file__).parent / "store" / "fake_hub.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_hub"] = module
    spec.loader.exec_module(module)
    hub = module.FakeHub(tmp_path / "hub")
    server = hub.start()
    yield hub
    server.shutdown()
    server.server_close()
