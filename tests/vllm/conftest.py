"""Runs of tiny models published for real, and the vLLM engine that follows them.

Everything here starts real vLLM servers. Without vLLM the tests are skipped, but under CI they
fail: `make test-vllm` makes the environment.
"""

import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what the tests here share

from tiny_runs import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    VLLM,
    FreshEngines,
    MakeReplica,
    MakeRun,
    Replica,
    TinyRun,
    open_run,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(1800))
            if missing and os.environ.get("CI") != "true":
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshEngines]:
    """Engines to compare with; the process is shared, every engine in it is new."""
    engines = FreshEngines(tmp_path_factory.mktemp("fresh"))
    yield engines
    engines.close()


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Opens runs: make_run("tied", encoding="compact")."""
    made: list[TinyRun] = []

    def make(kind: str, **options: Any) -> TinyRun:
        folder = tmp_path / f"run-{len(made)}"
        made.append(open_run(kind, folder, **options))
        return made[-1]

    yield make
    for run in made:
        run.publisher.close()


@pytest.fixture
async def make_replica(tmp_path: Path) -> AsyncIterator[MakeReplica]:
    """Makes replicas of a run, not started: make_replica(run, arguments=(...))."""
    made: list[Replica] = []

    def make(run: TinyRun, *, arguments: tuple[str, ...] = (), **options: Any) -> Replica:
        name = f"r{len(made)}"
        from deltawire_inference.engines.vllm.engine import VllmEngine
        from deltawire_inference.engines.vllm.options import VllmOptions

        engine = VllmEngine(
            VllmOptions(
                command=(str(VLLM),),
                arguments=(*CPU_ARGUMENTS, *arguments),
                environment=CPU_ENVIRONMENT,
                state_dir=tmp_path / name,
                **options,
            )
        )
        made.append(Replica(engine, run.follower(name)))
        return made[-1]

    yield make
    for replica in made:
        await replica.engine.close()
