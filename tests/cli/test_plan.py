"""What `deltawire run` refuses before it starts anything, and how a run here is found again."""

import socket
import stat
from pathlib import Path

import pytest
from pydantic import SecretStr

from deltawire.cli.local_run import find_run, findable
from deltawire.cli.plan import RunOptions, check_options, make_plan
from deltawire.cli.status import address_of
from deltawire.job.spec import JobSpec
from deltawire.protocol.errors import SettingsError


def options(runs: Path, **changed: object) -> RunOptions:
    defaults: dict[str, object] = {
        "job_path": Path("job.py"),
        "overrides": [],
        "runs_dir": runs,
        "replicas": 1,
        "engine": "torch",
        "store": None,
        "streams": None,
        "port": 0,
    }
    return RunOptions(**{**defaults, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"engine": "vlm"}, "--engine 'vlm' is not known; did you mean 'vllm'"),
        ({"store": "foo://x"}, "--store: store 'foo://x': expected file:///folder"),
        ({"store": "hf://models/x"}, "--store: .*expected hf://buckets"),
        ({"streams": "http://x"}, "--streams: expected redis://"),
        ({"port": 65534}, "--port: 3 consecutive ports from 65534 on"),
        ({"port": -1}, "--port: 3 consecutive ports from -1 on"),
    ],
)
def test_an_option_that_cannot_work_is_named_and_leaves_no_run_folder(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        make_plan(options(tmp_path / "runs", **changed), JobSpec(name="j"), run_id="r")
    assert not (tmp_path / "runs").exists()


def test_an_engine_that_is_not_installed_is_told_of_as_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("INFERENCE_VLLM_COMMAND", raising=False)
    with pytest.raises(SettingsError, match="--engine vllm: no vLLM here"):
        check_options(options(tmp_path, engine="vllm"))


def test_a_port_in_use_leaves_no_run_folder(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} is in use"):
            make_plan(options(tmp_path / "runs", port=port), JobSpec(name="j"), run_id="r")
    assert not (tmp_path / "runs").exists()


def test_a_good_plan_has_its_folder(tmp_path: Path) -> None:
    plan = make_plan(options(tmp_path, store=f"file://{tmp_path}/b"), JobSpec(name="j"), run_id="r")
    assert plan.logs.is_dir()
    assert len(plan.ports) == 3


def test_a_run_is_found_while_it_lasts_by_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    folder.mkdir()
    with findable(folder, {"trainer": "http://127.0.0.1:1"}, SecretStr("t0ken")):
        assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
        found = find_run(tmp_path, "r1")
        assert found.urls == ["http://127.0.0.1:1"]
        assert found.token.get_secret_value() == "t0ken"
        assert "t0ken" not in (folder / "services.json").read_text()
    (folder / "summary.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"run r1 is not running; .*summary\.json"):
        find_run(tmp_path, "r1")
    with pytest.raises(SettingsError, match="start one with `deltawire run JOB`"):
        find_run(tmp_path, "latest")


def test_an_address_without_a_scheme_is_meant_as_http() -> None:
    assert address_of("localhost:7880") == "http://localhost:7880"
    assert address_of("https://x.hf.space") == "https://x.hf.space"
