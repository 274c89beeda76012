"""A service serves with what its own distribution installs, and no more."""

import asyncio
import importlib.util
import os
import signal

import httpx
import pytest
from fastapi import FastAPI

from deltawire.service.serve import bind, serve


@pytest.mark.parametrize("installed", [True, False])
async def test_a_service_answers_with_and_without_a_websocket_library(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    app = FastAPI()

    @app.get("/healthz")
    async def healthz() -> str:
        return "alive"

    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(serve(app, listener))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as client:
            assert (await client.get("/healthz")).json() == "alive"
        serving.cancel()
        await asyncio.wait({serving})


async def test_a_drain_that_fails_ends_the_service_all_the_same() -> None:
    async def drain() -> None:
        raise RuntimeError("cannot finish")

    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(serve(FastAPI(), listener, drain=drain))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as client:
            assert (await client.get("/nowhere")).status_code == 404
        os.kill(os.getpid(), signal.SIGTERM)
        done, _ = await asyncio.wait({serving}, timeout=60.0)
        serving.cancel()
    assert done
