"""kill -9 of the child, of the service, of both: back at the newest version without a person."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tiny_runs import CPU_ARGUMENTS, CPU_ENVIRONMENT, PROMPTS, RUN_ID, VLLM, MakeRun, TinyRun

READY_S = 600.0


class Service:
    """The real inference service as a process, with vLLM behind it."""

    def __init__(self, run: TinyRun, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.run, self.state = run, folder / "state"
        self.log = folder / "service.log"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
        self.environment = os.environ | CPU_ENVIRONMENT
        self.environment |= {
            "INFERENCE_PORT": str(port),
            "INFERENCE_STORE": run.store.uri,
            "INFERENCE_RUN_ID": RUN_ID,
            "INFERENCE_ENGINE": "vllm",
            "INFERENCE_VLLM_COMMAND": str(VLLM),
            "INFERENCE_VLLM_ARGUMENTS": " ".join(CPU_ARGUMENTS),
            "INFERENCE_VLLM_STATE_DIR": str(self.state),
            "INFERENCE_POLL_S": "0.2",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deltawire_inference"],
                env=self.environment,
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(timeout=300)

    def group(self) -> list[int]:
        """Processes of vLLM's group: leash, server, engine core and workers."""
        record = self.state / "vllm.pgid"
        if not record.exists():
            return []
        leader = int(record.read_text().split()[0])
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if of(pid, leader)
        ]

    def status(self) -> dict[str, object] | None:
        try:
            answer = self.http.get("/status")
        except httpx.HTTPError:
            return None
        return dict(answer.json()) if answer.is_success else None

    def wait_for_version(self, version: int) -> None:
        """Until it serves this version, proved by digest, and answers with it."""
        deadline = time.monotonic() + READY_S
        while True:
            status = self.status()
            if status and status["state"] == "serving" and status["version"] == version:
                break
            alive = self.process is not None and self.process.poll() is None
            assert alive, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, (status, self.log.read_text()[-3000:])
            time.sleep(0.1)
        assert status["digest"] == self.run.publisher.digest
        body = {"prompt_ids": PROMPTS[0], "sampling": {"max_new_tokens": 8, "temperature": 0}}
        answer = self.http.post("/v1/generate", json=body)
        assert answer.is_success, answer.text
        spans = answer.json()["completions"][0]["spans"]
        assert {span["version"] for span in spans} == {version}


def of(pid: int, group: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(stat[2]) == group and stat[0] != "Z"


@contextmanager
def running(run: TinyRun, folder: Path) -> Iterator[Service]:
    service = Service(run, folder)
    service.start()
    try:
        yield service
    finally:
        service.stop()
        service.http.close()
        assert service.group() == []


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)


@pytest.mark.timeout(1800)
def test_whatever_is_killed_the_newest_version_is_served_again(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("untied", encoding="compact")
    with running(run, tmp_path) as service:
        service.wait_for_version(0)
        service.wait_for_version(run.step())

        # The child, while an update is on its way.
        group = service.group()
        assert len(group) >= 3
        version = run.step()
        time.sleep(0.25)
        for pid in group[1:]:
            os.kill(pid, signal.SIGKILL)
        service.wait_for_version(version)

        # The service, while an update is on its way: its child goes with it.
        group = service.group()
        version = run.step()
        time.sleep(0.25)
        service.kill()
        service.start()
        service.wait_for_version(version)
        wait_until_gone(group)

        # Everything at once, the leash included.
        group = service.group()
        version = run.step()
        service.kill()
        for pid in group:
            os.kill(pid, signal.SIGKILL)
        service.start()
        service.wait_for_version(version)
        service.wait_for_version(run.step())
