"""Every example job trains a step or two in real processes, with a tiny random model."""

from pathlib import Path

import pytest

from .conftest import StartRun

pytestmark = pytest.mark.e2e

JOBS = sorted((Path(__file__).parents[2] / "jobs").glob("*.py"))
SHORT = [
    "train.steps=2",
    "train.groups_per_step=2",
    "train.group_size=2",
    "train.min_group=1",
    "sampling.max_new_tokens=6",
    "env.max_tokens=1000",
    "eval.episodes=2",
]


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_an_example_job_trains(start_run: StartRun, job: Path) -> None:
    run = start_run(*SHORT, job=str(job))
    assert run.wait(240) == 0, run.logs()
    summary = run.summary()
    assert len(summary["steps"]) == 2, run.logs()
    assert summary["groups"]["lost"] == 0
    assert "error" not in summary["groups"]["dropped"], summary["groups"]
