"""The service as a process: from nothing but bucket coordinates to tokens, and a clean end."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.generation import GenerateResponse
from deltawire.service.serve import bind

if TYPE_CHECKING:
    from tests.inference.conftest import MakeRun, TinyRun

TOKEN = "process-test"


class Process:
    """`python -m deltawire_inference` on a run."""

    def __init__(self, run: "TinyRun", port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "INFERENCE_STORE": run.store.uri,
            "INFERENCE_RUN_ID": run.run_id,
            "INFERENCE_TOKEN": TOKEN,
            "INFERENCE_PORT": str(port),
            "INFERENCE_POLL_S": "0.2",
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Until it is ready."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deltawire_inference", env=self._environ
        )
        async with httpx.AsyncClient() as client:
            while True:
                assert self.process.returncode is None
                try:
                    if (await client.get(self.url + "/readyz")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and wait."""
        assert self.process is not None
        self.process.send_signal(number)
        return await self.process.wait()


@pytest.fixture
async def run_process() -> AsyncIterator[list[Process]]:
    """Processes that are killed at the end, whatever happened."""
    processes: list[Process] = []
    yield processes
    for made in processes:
        if made.process is not None and made.process.returncode is None:
            made.process.kill()
            await made.process.wait()


async def test_a_killed_replica_starts_again_at_the_newest_version_and_ends_at_sigterm(
    make_run: "MakeRun", run_process: list[Process], tmp_path: Path
) -> None:
    run = make_run()
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    service = Process(run, port)
    run_process.append(service)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    await service.start()
    run.publish()

    assert await service.end(signal.SIGKILL) == -signal.SIGKILL
    run.publish()
    await service.start()

    async with httpx.AsyncClient(headers=headers, base_url=service.url, timeout=60) as client:
        status = ReplicaStatus.model_validate_json((await client.get("/status")).content)
        answer = await client.post("/v1/generate", json={"prompt_ids": [1, 2], "n": 2})
    assert (status.version, status.digest) == (2, run.publisher.digest)
    generated = GenerateResponse.model_validate_json(answer.content)
    assert {span.version for c in generated.completions for span in c.spans} == {2}
    assert await service.end(signal.SIGTERM) in (0, -signal.SIGTERM)
