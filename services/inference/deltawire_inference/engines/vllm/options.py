"""What can be chosen about a vLLM child, and the command line it becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deltawire.protocol.chain import RunManifest
from deltawire_inference.vllm_plugin import BACKEND
from deltawire_inference.vllm_plugin.swap_route import SWAP_PLUGIN

MODEL_NAME = "policy"
"""What vLLM calls the base model; adapters have names of their own."""
WORKER_EXTENSION = "deltawire_inference.vllm_plugin.worker.WorkerExtension"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for its --max-lora-rank."""
_VERSIONS_AT_ONCE = 4
"""Versions of an adapter that requests of one batch may use."""
_PRIVATE_PREFIXES = ("INFERENCE_", "TRAINER_", "ENVIRONMENT_", "AWS_")
_PRIVATE = frozenset({"DELTAWIRE_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Set once per replica."""

    command: tuple[str, ...] = ("vllm",)
    """The executable; another virtual environment's is fine."""
    arguments: tuple[str, ...] = ()
    """Appended to `vllm serve`, so they win: `--tensor-parallel-size 2`, `--enforce-eager`, ..."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the child's environment."""
    state_dir: Path = Path("/tmp/deltawire-vllm")
    """Socket, merged checkpoint and staged patches. One replica each."""
    max_length: int | None = None
    """Tokens of one sequence, prompt included; None takes the model's own."""
    adapters: int = 0
    """How many LoRA adapters are held at once; 0 serves none."""
    max_lora_rank: int = 64
    start_timeout_s: float = 900.0
    stage_timeout_s: float = 600.0
    worker_extension: str = WORKER_EXTENSION

    @property
    def capabilities(self) -> frozenset[str]:
        """What the arguments ask vLLM to return, in the engine seam's words."""
        offered = {"score"}
        if "--return-sampling-mask" in self.arguments:
            offered.add("sampling_mask")
        if "--enable-return-routed-experts" in self.arguments:
            offered.add("routed_experts")
        if self.adapters:
            offered.add("adapters")
        return frozenset(offered)

    def for_run(self, manifest: RunManifest) -> VllmOptions:
        """With room for the versions of a LoRA run's adapter that live side by side."""
        if manifest.adapter is None:
            return self
        rank = next((room for room in _RANKS if room >= manifest.adapter.rank), _RANKS[-1])
        return replace(self, adapters=max(self.adapters, _VERSIONS_AT_ONCE), max_lora_rank=rank)


def serve_command(options: VllmOptions, *, model_dir: Path, socket: Path, dtype: str) -> list[str]:
    """The `vllm serve` command line of a child that serves `model_dir` on a socket."""
    command = [*options.command, "serve", str(model_dir)]
    command += ["--served-model-name", MODEL_NAME, "--uds", str(socket), "--dtype", dtype]
    command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    command += ["--worker-extension-cls", options.worker_extension]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--disable-uvicorn-access-log"]  # its last lines are kept for errors
    if options.max_length is not None:
        command += ["--max-model-len", str(options.max_length)]
    if options.adapters:
        command += ["--enable-lora", "--max-loras", str(options.adapters)]
        command += ["--max-lora-rank", str(options.max_lora_rank)]
    return [*command, *options.arguments]


def serve_environment(options: VllmOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: ours without the services' secrets, and what vLLM must be told."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _PRIVATE and not name.startswith(_PRIVATE_PREFIXES)
    }
    told = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": f"{BACKEND},{SWAP_PLUGIN}",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if options.adapters:
        told["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return kept | told | dict(options.environment)
