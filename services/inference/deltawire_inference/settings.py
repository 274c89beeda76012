"""Everything the inference service can be told, as INFERENCE_* variables."""

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr
from pydantic_settings import SettingsConfigDict

from deltawire.service.settings import Port, ServiceSettings
from deltawire_inference.engines.base import SwapMode


class InferenceSettings(ServiceSettings):
    """One class, built in __main__, passed down."""

    model_config = SettingsConfigDict(
        env_prefix="INFERENCE_", frozen=True, extra="ignore", env_ignore_empty=True
    )

    port: Port = 7861
    """Port to bind; 0 takes a free one."""
    store: str
    """The bucket: file:///folder, hf://buckets/owner/name/prefix or s3://bucket/prefix."""
    streams: SecretStr | None = None
    """redis://…, rediss://… or https://trainer. With it the replica also produces rollouts."""
    environment_url: str = ""
    """The environment service that episodes run in; several with commas between."""
    environment_token: SecretStr | None = None
    """Token of the environment service, where it is not this one's."""
    public_url: str = ""
    """Where others reach this replica; told to the trainer so that it can send notices. When empty:
    the Space's address, or this machine's name in a network of containers."""
    space_host: str = Field("", validation_alias="SPACE_HOST")
    """Set by Hugging Face inside a Space."""
    replica_id: str = Field("", max_length=128)
    """Unique among live replicas; drawn when empty."""
    engine: Literal["torch", "vllm"] = "torch"
    """What generates: a transformers model in this process, or a vLLM server as a child."""
    concurrency: PositiveInt = 64
    """Episodes that run at once."""
    poll_s: PositiveFloat = 5.0
    """Seconds between two looks at the bucket when no notice comes."""
    swap_mode: SwapMode | None = None
    """What a swap does to running requests: keep, keep_kv, drain or abort. When not given, what
    the run's job chose."""
    verify_s: NonNegativeFloat = 300.0
    """Seconds between two full recomputations of the weights' digest; 0 for never."""
    cache_dir: Path | None = None
    """Where fetched objects are kept; a private folder, gone at exit, when not given."""
    drain_s: NonNegativeFloat = 2.0
    """After SIGTERM, how long running episodes may go on; the rest is given back."""
    body_bytes: PositiveInt = 8 * 2**20
    """Largest HTTP body."""
    threads: NonNegativeInt = 0
    """CPU threads of the torch engine; 0 leaves it to torch."""
    device: str = "cpu"
    """Where the torch engine computes: cpu, cuda, cuda:1, ..."""
    max_rows: PositiveInt = 64
    """Completions that the torch engine runs at once; others wait."""
    max_length: PositiveInt = 4096
    """Tokens of one sequence, prompt included; the model's own limit if that is lower."""
    max_step_tokens: PositiveInt = 4096
    """Tokens of one forward pass of the torch engine."""
    vllm_command: str = "vllm"
    """The vLLM executable, with our plugin installed beside it."""
    vllm_arguments: str = ""
    """Appended to `vllm serve`: --tensor-parallel-size 2 --gpu-memory-utilization 0.85 …"""
    vllm_adapters: NonNegativeInt = 0
    """How many LoRA adapters vLLM holds at once; 0 serves none."""
    vllm_state_dir: Path | None = None
    """Socket, merged checkpoint and patches of the vLLM child; one folder a replica."""
    vllm_start_timeout_s: PositiveFloat = 900.0
    """How long vLLM may take until it answers."""
    prefix_bytes: NonNegativeInt = 512 * 2**20
    """KV that the torch engine keeps for shared prefixes and next turns."""

    @property
    def url(self) -> str:
        """Where notices reach this replica."""
        if self.public_url:
            return self.public_url
        if self.space_host:
            return f"https://{self.space_host}"
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{name}:{self.port}" if self.port else ""
