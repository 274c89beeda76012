"""The service with vLLM behind it, as a process: beside another engine on one bucket, and killed.

kill -9 of the child, of the service, of both, in the middle of staging and of applying: back at the
newest version without a person, and no answer ever comes from half a model.
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_runs import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    PROMPTS,
    RUN_ID,
    VLLM,
    FreshEngines,
    TinyRun,
    open_run,
)

from deltawire_inference.engines.vllm.workspace import Workspace

READY_S = 900.0
PROMPT, TOKENS = PROMPTS[0][:12], 8
"""Shorter than a block of keys and values, so no answer depends on what a cache holds."""
LONG = {"max_new_tokens": 1900, "temperature": 1.0, "ignore_eos": True}
"""Mode drain waits for it, so a swap stays in `applying` as long as it runs."""


class Service:
    """The real inference service as a process, with vLLM behind it."""

    def __init__(self, run: TinyRun, folder: Path, **settings: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.run, self.state_dir = run, folder / "state"
        self.log = folder / "service.log"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=READY_S)
        self.environment = os.environ | CPU_ENVIRONMENT
        self.environment |= {
            "INFERENCE_PORT": str(port),
            "INFERENCE_STORE": run.store.uri,
            "INFERENCE_RUN_ID": RUN_ID,
            "INFERENCE_ENGINE": "vllm",
            "INFERENCE_VLLM_COMMAND": str(VLLM),
            "INFERENCE_VLLM_ARGUMENTS": " ".join(CPU_ARGUMENTS),
            "INFERENCE_VLLM_STATE_DIR": str(self.state_dir),
            "INFERENCE_SWAP_MODE": "drain",
            "INFERENCE_POLL_S": "0.2",
        } | settings
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
        """Processes of vLLM's group, the leash first: server, engine core and workers."""
        record = self.state_dir / "vllm.pgid"
        if not record.exists():
            return []
        leader = int(record.read_text().split()[0])
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        return sorted((p for p in pids if in_group(p, leader)), key=lambda p: (p != leader, p))

    def freeze(self) -> None:
        """Stop vLLM's workers where they are, so that nothing goes on."""
        workers = [pid for pid in self.group() if title_of(pid).startswith(b"VLLM::Worker")]
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)

    def status(self) -> dict[str, Any]:
        try:
            answer = self.http.get("/status")
        except httpx.HTTPError:
            return {}
        return dict(answer.json()) if answer.is_success else {}

    def generate(self, sampling: dict[str, Any]) -> dict[str, Any] | None:
        """One completion; None when the service or its child went away meanwhile."""
        body = {"prompt_ids": PROMPT, "sampling": sampling}
        try:
            answer = self.http.post("/v1/generate", json=body)
        except httpx.HTTPError:
            return None
        return dict(answer.json()["completions"][0]) if answer.is_success else None

    def wait_for(self, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + READY_S
        while not met(status := self.status()):
            alive = self.process is not None and self.process.poll() is None
            assert alive, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, (status, self.log.read_text()[-3000:])
            time.sleep(0.02)
        return status

    def wait_for_version(self, version: int) -> None:
        """Until it serves this version, proved by digest."""
        status = self.wait_for(
            lambda s: s.get("state") == "serving" and s.get("version") == version
        )
        assert status["digest"] == self.run.publisher.digest


def title_of(pid: int) -> bytes:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def in_group(pid: int, group: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(stat[2]) == group and stat[0] != "Z"


@contextmanager
def running(run: TinyRun, folder: Path, **settings: str) -> Iterator[Service]:
    service = Service(run, folder, **settings)
    service.start()
    try:
        yield service
    finally:
        group = service.group()
        service.stop()
        service.http.close()
        wait_until_gone(group)


class Witness:
    """A client that never stops asking, and keeps every answer."""

    def __init__(self, service: Service) -> None:
        self.answers: list[dict[str, Any]] = []
        self.turn = threading.Lock()
        """Held by whoever asks: two requests in one batch differ in the last bits."""
        self._service, self._stop = service, threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        greedy = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        while not self._stop.wait(0.05):
            with self.turn:
                answer = self._service.generate(greedy)
            if answer is not None:
                self.answers.append(answer)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def in_the_middle_of_staging(service: Service, witness: Witness) -> int:
    """Publish; the workers stand still, so staging cannot end."""
    del witness
    service.freeze()
    version = service.run.step()
    service.wait_for(lambda s: s.get("state") == "staging")
    return version


def in_the_middle_of_applying(service: Service, witness: Witness) -> int:
    """Publish while a long request runs, which mode drain waits for; then stop the workers."""
    with witness.turn:
        while True:
            long = threading.Thread(target=service.generate, args=[LONG])
            long.start()
            service.wait_for(lambda s: s.get("running_requests", 0) > 0)
            version = service.run.step()
            status = service.wait_for(
                lambda s, v=version: s.get("state") == "applying" or s.get("version") == v
            )
            if status["version"] != version:
                service.freeze()
                return version
            long.join()  # a slow machine: the request was over before


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it went with another
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + READY_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)


def kill_child(service: Service) -> None:
    """All of vLLM but the leash."""
    kill_all(service.group()[1:])


def kill_service(service: Service) -> None:
    group = service.group()
    service.kill()
    service.start()
    wait_until_gone(group)  # its child goes with it


def kill_both(service: Service) -> None:
    """Everything at once, the leash included."""
    group = service.group()
    service.kill()
    kill_all(group)
    service.start()


KILLS = (kill_child, kill_service, kill_both)
MOMENTS = (in_the_middle_of_staging, in_the_middle_of_applying)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    folder = tmp_path_factory.mktemp("crash") / "run"
    run = open_run("untied", folder, encoding="compact", keep_versions=50)
    yield run
    run.publisher.close()


@pytest.fixture(scope="module")
def service(run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(run, tmp_path_factory.mktemp("service")) as service:
        service.wait_for_version(run.publisher.version)
        yield service
    assert not list(Workspace(service.state_dir).memory.glob("*"))


def test_replicas_of_both_engines_follow_one_bucket_and_pins_are_answered_with_409(
    run: TinyRun, service: Service, tmp_path: Path
) -> None:
    with running(run, tmp_path, INFERENCE_ENGINE="torch") as other:
        for _ in range(2):
            version = run.step()
            service.wait_for_version(version)
            other.wait_for_version(version)
        statuses = [service.status(), other.status()]
        assert [status["engine"] for status in statuses] == ["vllm", "torch"]
        assert {status["head_version"] - status["version"] for status in statuses} == {0}

        body = {"prompt_ids": PROMPT, "policy_version": version + 1}
        for replica in (service, other):
            early = replica.http.post("/v1/generate", json=body)
            assert early.status_code == 409
            assert int(early.headers["retry-after"]) > 0
        run.step()
        for replica in (service, other):
            replica.wait_for_version(version + 1)
            assert replica.http.post("/v1/generate", json=body).is_success


@pytest.mark.timeout(3600)
def test_whatever_is_killed_whenever_the_newest_version_is_served_again(
    run: TinyRun, service: Service, fresh: FreshEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = {run.publisher.version: run.export()}
    publish = run.step

    def step() -> int:
        version = publish()
        checkpoints[version] = run.export()
        return version

    monkeypatch.setattr(run, "step", step)
    witness = Witness(service)
    try:
        for moment, kill in itertools.product(MOMENTS, KILLS):
            version = moment(service, witness)
            kill(service)
            service.wait_for_version(version)
            seen = len(witness.answers)
            service.wait_for_version(run.step())
            while len(witness.answers) < seen + 2:
                time.sleep(0.05)
    finally:
        witness.close()
    assert service.status()["rejected_total"] == 0

    said: dict[int, set[str]] = {}
    for answer in witness.answers:
        (span,) = answer["spans"]  # mode drain: never two versions in one answer
        said.setdefault(span["version"], set()).add(str((answer["token_ids"], answer["logprobs"])))
    expected = {v: fresh.ask(checkpoints[v], prompts=[PROMPT], tokens=TOKENS)[0] for v in said}
    assert said == {version: {str(answer)} for version, (answer,) in expected.items()}
    assert len(said) > len(KILLS) * len(MOMENTS)
    assert len(set().union(*said.values())) == len(said)
