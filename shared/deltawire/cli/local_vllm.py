"""Which vLLM a run on this machine serves through."""

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from deltawire.protocol.errors import SettingsError

CPU_BUILD = Path(".venv-vllm/bin/vllm")
"""Where `make test-vllm` puts a vLLM that needs no GPU."""
_COMMAND, _ARGUMENTS = "INFERENCE_VLLM_COMMAND", "INFERENCE_VLLM_ARGUMENTS"


def vllm_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that replicas need beside `environ`: none where a vLLM is named or on the PATH.

    The CPU build in `folder` compiles nothing and takes 1 GiB for keys and values: it starts in
    half a minute, and the machine is the trainer's too.

    Raises:
        SettingsError: There is no vLLM at all, or not the one that is named.
    """
    path = environ.get("PATH", "")
    if named := environ.get(_COMMAND):
        if shutil.which(shlex.split(named)[0], path=path) is None:
            raise SettingsError(f"--engine vllm: {_COMMAND} names {named!r}, which is no program")
        return {}
    if shutil.which("vllm", path=path):
        return {}
    command = folder.absolute() / CPU_BUILD
    if not command.exists():
        raise SettingsError(
            "--engine vllm: no vLLM here; install it so that `vllm` is on the PATH, name its "
            f"command in {_COMMAND}, or let `make test-vllm` build {CPU_BUILD} for machines "
            "without a GPU. --engine torch needs none of it"
        )
    defaults = {
        _ARGUMENTS: "--enforce-eager",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    kept = {name: value for name, value in defaults.items() if name not in environ}
    return {_COMMAND: str(command), **kept}
