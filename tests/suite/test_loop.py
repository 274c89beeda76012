"""The promises of the product, on the whole loop in real processes."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from .conftest import StartRun

pytestmark = pytest.mark.e2e

SMALL = (
    "train.steps=6",
    "train.groups_per_step=2",
    "train.group_size=4",
    "train.lr=1e-3",
    "train.warmup_steps=0",
    "sampling.max_new_tokens=12",
)


def test_two_replicas_end_equal_to_the_trainer_in_every_bit(start_run: StartRun) -> None:
    run = start_run(*SMALL, "--replicas", "2")
    assert run.wait(85) == 0, run.logs()
    summary = run.summary()
    assert [step["version"] for step in summary["steps"]] == [1, 2, 3, 4, 5, 6]
    assert summary["version"] == 6
    assert len(summary["replicas"]) == 2
    for replica in summary["replicas"]:
        assert replica["version"] == 6
        assert replica["digest"] == summary["digest"] != ""
    groups = summary["groups"]
    assert groups["lost"] == 0
    assert groups["doubled"] == 0
    assert groups["trained"] == 12
    assert groups["issued"] == groups["trained"] + sum(groups["dropped"].values())
    assert all(step["delta_bytes"] < step["full_bytes"] for step in summary["steps"])
    assert all(0 < step["density"] <= 1 for step in summary["steps"])
    assert (run.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert run.output().count("sync ") == 6


def test_a_killed_replica_comes_back_and_the_run_ends(start_run: StartRun) -> None:
    run = start_run(*SMALL, "train.steps=14")
    run.wait_for("step 2/14", 80)
    run.child("deltawire_inference").send_signal(signal.SIGKILL)
    run.wait_for("inference-0 died and was started again", 30)
    assert run.wait(150) == 0, run.logs()
    summary = run.summary()
    assert summary["restarts"] == {"inference-0": 1}
    assert summary["version"] == 14
    assert summary["replicas"][0]["digest"] == summary["digest"]
    assert summary["groups"]["lost"] == 0
    assert summary["groups"]["doubled"] == 0


def test_a_killed_trainer_resumes_and_trains_nothing_twice(start_run: StartRun) -> None:
    run = start_run(*SMALL, "train.steps=14")
    run.wait_for("step 5/14", 80)
    run.child("deltawire_trainer").send_signal(signal.SIGKILL)
    assert run.wait(150) == 0, run.logs()
    summary = run.summary()
    assert summary["replicas"][0]["digest"] == summary["digest"]
    assert summary["groups"]["lost"] == 0
    assert [step["step"] for step in summary["steps"]] == list(range(1, 15))


def test_ctrl_c_stops_every_process(start_run: StartRun) -> None:
    run = start_run(*SMALL, "train.steps=500")
    run.wait_for("step 1/500", 80)
    children = psutil.Process(run.process.pid).children(recursive=True)
    assert len(children) >= 4
    run.process.send_signal(signal.SIGINT)
    assert run.wait(15) == 130
    assert not [child for child in children if child.is_running()]


def test_a_missing_model_is_one_sentence(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(*SMALL, model=tmp_path / "nowhere")
    assert run.wait(80) not in (0, 130)
    assert "nowhere" in run.output()
    assert "Traceback" not in run.output()


def test_the_summary_tells_of_phases(start_run: StartRun) -> None:
    run = start_run(*SMALL, "train.steps=3")
    assert run.wait(85) == 0, run.logs()
    steps = json.loads((run.folder / "summary.json").read_text())["steps"]
    assert {"diff", "encode", "upload", "commit", "announce"} <= set(steps[0]["phases_s"])
    assert not (run.folder / "token").exists()


def test_the_last_version_is_evaluated_before_the_run_ends(start_run: StartRun) -> None:
    run = start_run(*SMALL, "train.steps=2", "eval.every=1", "eval.episodes=4")
    assert run.wait(280) == 0, run.logs()
    last = run.summary()["evals"][-1]
    assert (last["version"], last["episodes"], last["expected"]) == (2, 4, 4)
    assert f"eval v2 reward {last['reward']:.3f} (4 of 4)" in run.output()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_service_outlives_the_launcher(
    start_run: StartRun, number: signal.Signals, code: int
) -> None:
    run = start_run(*SMALL, "train.steps=500")
    run.wait_for("step 1/500", 80)
    children = psutil.Process(run.process.pid).children(recursive=True)
    redis = [child for child in children if "redis" in child.name() or "valkey" in child.name()]
    services = [run.child(f"deltawire_{name}") for name in ("trainer", "inference", "environment")]
    assert len(redis) == 1
    run.process.send_signal(number)
    assert run.wait(15) == code
    _, alive = psutil.wait_procs([*services, *redis], timeout=10)
    assert not alive
