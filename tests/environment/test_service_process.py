"""The service as a process: it serves the job it was given, drains, and goes."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import httpx
from websockets.asyncio.client import connect

ROOT = Path(__file__).resolve().parents[2]


async def start(**environ: str) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "deltawire_environment",
        env={
            "PATH": os.environ["PATH"],
            "ENVIRONMENT_PORT": "0",
            "ENVIRONMENT_LOG_FORMAT": "json",
            **environ,
        },
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async for line in process.stderr:
        found = re.search(rb'"port": (\d+)', line)
        if found:
            return process, f"127.0.0.1:{int(found[1])}"
    raise AssertionError("the service did not start")


async def test_it_serves_the_job_file_and_ends_an_episode_before_it_goes() -> None:
    process, where = await start(
        ENVIRONMENT_JOB=str(ROOT / "jobs/guess.py"),
        ENVIRONMENT_JOB_OVERRIDES='["train.steps=3"]',
        ENVIRONMENT_DRAIN_S="20",
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{where}", timeout=20) as http:
            assert (await http.get("/job")).json()["train"]["steps"] == 3
            async with connect(f"ws://{where}/ws", proxy=None) as socket:
                await socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
                await socket.recv()
                process.send_signal(signal.SIGTERM)
                for _ in range(500):
                    reason = (await http.get("/readyz")).json()["reason"]
                    if reason:
                        break
                    await asyncio.sleep(0.02)
                assert reason == "draining"
                async with connect(f"ws://{where}/ws", proxy=None) as late:
                    assert "shutting down" in json.loads(await late.recv())["data"]["message"]
                await socket.send(json.dumps({"type": "step", "data": {"message": "[crane]"}}))
                assert json.loads(await socket.recv())["type"] == "observation"
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_wrong_job_file_ends_it_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("job = 3\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "deltawire_environment",
        env={"ENVIRONMENT_JOB": str(tmp_path / "broken.py"), "ENVIRONMENT_PORT": "0"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"broken.py defines no Job" in said
    assert b"Traceback" not in said
