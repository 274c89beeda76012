"""Which vLLM a run on this machine serves through."""

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
        SettingsError: There is no vLLM at all.
    """
    if environ.get(_COMMAND) or shutil.which("vllm", path=environ.get("PATH", "")):
        return {}
    command = folder.absolute() / CPU_BUILD
    if not command.exists():
        raise SettingsError(
            f"no vLLM here: expected {_COMMAND}, vllm on the PATH, or {CPU_BUILD}, "
            "which `make test-vllm` builds for machines without a GPU"
        )
    defaults = {
        _ARGUMENTS: "--enforce-eager",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    kept = {name: value for name, value in defaults.items() if name not in environ}
    return {_COMMAND: str(command), **kept}
