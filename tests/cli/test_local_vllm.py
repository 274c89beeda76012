"""`ENGINE=vllm make run` finds the vLLM that is there, and says so when there is none."""

from pathlib import Path

import pytest

from deltawire.cli.local_vllm import CPU_BUILD, vllm_environment
from deltawire.protocol.errors import SettingsError


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    return path


def test_without_any_vllm_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="make test-vllm"):
        vllm_environment(tmp_path, {"PATH": str(tmp_path)})


def test_the_build_for_machines_without_a_gpu_is_found_with_what_it_needs(tmp_path: Path) -> None:
    vllm = executable(tmp_path / CPU_BUILD)
    asked = {"PATH": str(tmp_path), "VLLM_CPU_KVCACHE_SPACE": "4"}
    found = vllm_environment(tmp_path, asked)
    assert found["INFERENCE_VLLM_COMMAND"] == str(vllm)
    assert found["INFERENCE_VLLM_ARGUMENTS"] == "--enforce-eager"
    assert "VLLM_CPU_KVCACHE_SPACE" not in found  # what the user said stands


@pytest.mark.parametrize("how", ["named", "on the path"])
def test_a_vllm_of_the_users_own_goes_first(tmp_path: Path, how: str) -> None:
    executable(tmp_path / CPU_BUILD)
    own = executable(tmp_path / "own" / "vllm")
    named = {"INFERENCE_VLLM_COMMAND": str(own), "PATH": ""}
    environ = named if how == "named" else {"PATH": str(own.parent)}
    assert vllm_environment(tmp_path, environ) == {}
