"""The whole loop in real processes over each kind of bucket, in each encoding.

A few pairs that meet every bucket and every encoding, with one replica; all twelve, with two, with
DELTAWIRE_SUITE=all.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltawire.cli.deltas import app

from .conftest import StartRun
from .test_loop import SMALL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ENDS_WITHIN_S = 400
"""Generous: the small Hub's content store admits one process at a time."""


def _s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"s3://{request.getfixturevalue('s3_bucket')}/weights"


def _hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    hub: Any = request.getfixturevalue("fake_hub")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test_token")
    return "hf://buckets/owner/name/weights"


def _file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    folder: Path = request.getfixturevalue("tmp_path")
    return f"file://{folder}/bucket"


ENCODINGS = ("seed", "compact", "classes", "auto")
EVERY_PAIR = list(itertools.product((_file, _s3, _hub), ENCODINGS))
A_FEW = [(_file, "classes"), (_s3, "seed"), (_hub, "compact"), (_s3, "auto")]


ALL = os.environ.get("DELTAWIRE_SUITE") == "all"
REPLICAS = 2 if ALL else 1


@pytest.mark.parametrize(
    ("store_of", "encoding"),
    EVERY_PAIR if ALL else A_FEW,
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_replica_and_trainer_end_equal_through_this_bucket(
    start_run: StartRun,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    store_of: Any,
    encoding: str,
) -> None:
    store = store_of(request, monkeypatch)
    run = start_run(
        *SMALL,
        "train.steps=3",
        "train.lr=1e-5",
        f"sync.encoding={encoding}",
        "--store",
        store,
        "--replicas",
        str(REPLICAS),
    )
    assert run.wait(ENDS_WITHIN_S) == 0, run.logs()

    summary = run.summary()
    assert summary["version"] == 3
    assert [r["digest"] for r in summary["replicas"]] == [summary["digest"]] * REPLICAS
    assert summary["digest"]
    written = {step["encoding"] for step in summary["steps"]}
    chosen = {"compact", "classes"} if encoding == "auto" else {encoding}
    assert written <= chosen | {"seed"}  # which is the smallest where very little changes
    assert "sound" in _verified(store, request)


def _verified(store: str, request: pytest.FixtureRequest) -> str:
    """What `deltawire deltas verify` says of the bucket the run left."""
    if store.startswith("hf://"):
        # This process imported the Hub's client before HF_ENDPOINT was set.
        return _verified_in_a_process_of_its_own(store)
    result = CliRunner().invoke(app, ["verify", store])
    assert result.exit_code == 0, result.output
    return result.output


def _verified_in_a_process_of_its_own(store: str) -> str:
    code = "import sys; from deltawire.cli.deltas import app; app(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", store],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
