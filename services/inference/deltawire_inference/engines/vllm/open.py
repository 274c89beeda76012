"""The settings of the inference service -> a vLLM engine that has not started."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from deltawire.protocol.errors import SettingsError
from deltawire_inference.engines.vllm.engine import VllmEngine
from deltawire_inference.engines.vllm.options import VllmOptions
from deltawire_inference.settings import InferenceSettings


def open_vllm(settings: InferenceSettings) -> VllmEngine:
    """An engine that has not started.

    Raises:
        SettingsError: There is no such vLLM executable.
    """
    command = tuple(shlex.split(settings.vllm_command))
    if not command or shutil.which(command[0]) is None:
        raise SettingsError(
            f"INFERENCE_VLLM_COMMAND={settings.vllm_command!r}: no such program; install vLLM "
            "beside deltawire-inference, or name its executable; for machines without a GPU "
            "`make test-vllm` builds .venv-vllm/bin/vllm"
        )
    return VllmEngine(
        VllmOptions(
            command=command,
            arguments=tuple(shlex.split(settings.vllm_arguments)),
            state_dir=settings.vllm_state_dir or _state_dir(settings.port),
            max_length=settings.max_length if "max_length" in settings.model_fields_set else None,
            adapters=settings.vllm_adapters,
            start_timeout_s=settings.vllm_start_timeout_s,
        )
    )


def _state_dir(port: int) -> Path:
    """The same at each start of one replica, so that it finds what it left when it was killed."""
    return Path(tempfile.gettempdir()) / f"deltawire-vllm-{os.getuid()}-{port or os.getpid()}"
