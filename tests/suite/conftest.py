"""The loop in real processes: a tiny random model, and one `deltawire run` to watch or break."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from bench.learning.tiny_model import write_tiny_model

LETTERS = "tests/suite/letters_job.py"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level Llama of two layers with a chat template, as a folder a user could have."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class Run:
    """A `deltawire run` in progress."""

    process: subprocess.Popen[bytes]
    runs: Path
    out: Path

    @property
    def folder(self) -> Path:
        """Where this run keeps its files."""
        return self.runs / "latest"

    def summary(self) -> dict:
        """What it wrote at its end."""
        return json.loads((self.folder / "summary.json").read_text())

    def output(self) -> str:
        """What it printed so far, with the logs of its processes when something is wrong."""
        return self.out.read_text()

    def logs(self) -> str:
        """The tails of all logs."""
        tails = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("logs/*.log"))
        ]
        return "\n".join([self.output()[-3000:], *tails])

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end in {timeout_s} s\n{self.logs()}")

    def wait_for(self, phrase: str, timeout_s: float) -> None:
        """Until it printed a phrase."""
        deadline = time.monotonic() + timeout_s
        while phrase not in self.output():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{phrase!r} was never printed\n{self.logs()}")
            time.sleep(0.1)

    def child(self, module: str) -> psutil.Process:
        """The process of one service."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if module in process.cmdline():
                return process
        pytest.fail(f"no process runs {module}\n{self.logs()}")


StartRun = Callable[..., Run]


@pytest.fixture
def start_run(tmp_path: Path, tiny_model: Path) -> Iterator[StartRun]:
    """Start `deltawire run` on the tiny model; it is stopped at the end of the test."""
    started: list[Run] = []

    def start(*arguments: str, job: str = LETTERS, model: Path = tiny_model) -> Run:
        out = tmp_path / f"out-{len(started)}.txt"
        command = [
            *(sys.executable, "-m", "deltawire.cli.main", "run", job),
            *("--port", "0", "--runs", str(tmp_path / "runs"), "--plain"),
            f"model.source={model}",
            *arguments,
        ]
        with out.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DELTAWIRE_CACHE": str(tmp_path / "c")},
            )
        run = Run(process=process, runs=tmp_path / "runs", out=out)
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(timeout=15)


def call(url: str, path: str, token: str) -> dict:
    """One authorised GET."""
    answer = httpx.get(url + path, headers={"Authorization": f"Bearer {token}"}, timeout=10)
    answer.raise_for_status()
    return answer.json()
