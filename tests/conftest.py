"""What more than one room's tests use: a real S3 server, a small Hub, a fuzzer of REST faces.

A missing backend skips at home and fails under CI=true.
"""

import asyncio
import contextlib
import importlib.util
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
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


FUZZ_EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "10")
"""Requests schemathesis draws for each operation; a thousand take minutes."""

FUZZ_HOOKS = """
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):
    for field, value in SETTLED.get(case.operation.path, {}).items():
        kind = str if isinstance(value, str) else (int, float)
        if isinstance(case.body, dict) and isinstance(case.body.get(field, value), kind):
            case.body = {**case.body, field: value}
"""
"""Puts in what cannot be guessed, and how long to wait for what never comes."""

Beside = Callable[[], Coroutine[Any, Any, object]]


@pytest.fixture
def serve_in_thread() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """`with serve_in_thread(app, beside=train) as url`: an app over HTTP, with an event loop of its
    own that may run something beside it."""
    import uvicorn

    from deltawire.service.serve import bind

    @contextlib.contextmanager
    def serving(app: Any, *, beside: Beside | None = None) -> Iterator[str]:
        config = uvicorn.Config(
            app, log_config=None, ws="websockets-sansio", timeout_graceful_shutdown=1
        )
        server, listener = uvicorn.Server(config), bind("127.0.0.1", 0)

        async def run() -> None:
            task = asyncio.create_task(beside()) if beside else None
            await server.serve(sockets=[listener])
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

        thread = threading.Thread(target=asyncio.run, args=(run(),))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            listener.close()

    return serving


@pytest.fixture
def fuzz(tmp_path: Path) -> Callable[..., None]:
    """`fuzz(url)`: schemathesis sends every operation what its schema allows and what it does not;
    an answer of 5xx fails the test with the request that led to it."""
    need("schemathesis")

    def run(
        url: str,
        *,
        token: str = "",
        leave_out: tuple[str, ...] = (),
        settled: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
        **known: str,
    ) -> None:
        """Paths of `leave_out` are not asked. What is `settled` replaces fields that were drawn,
        by path; `known` are path parameters that name something there."""
        hooks = tmp_path / "fuzz_hooks.py"
        hooks.write_text(FUZZ_HOOKS.replace("SETTLED", repr(dict(settled))))
        config = tmp_path / "schemathesis.toml"
        lines = [f'"path.{name}" = "{value}"' for name, value in known.items()]
        config.write_text("\n".join(["[parameters]", *lines]))
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
            *("run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", FUZZ_EXAMPLES),
            *("--generation-deterministic", "--suppress-health-check", "all", "--no-color"),
            *("--warnings", "off", "--continue-on-failure", "--request-timeout", "60"),
            *(("-H", f"Authorization: Bearer {token}") if token else ()),
            *(word for path in leave_out for word in ("--exclude-path", path)),
        ]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)

    return run
