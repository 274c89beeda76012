"""A job as plain data: what the trainer and the producers need to know of it.

The user's Python file becomes a JobSpec in the environment service and the command line only;
trainer and inference read this and import none of it.
"""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from deltawire.protocol.generation import Sampling
from deltawire.protocol.wire_model import WireModel


class ModelSpec(WireModel):
    """The base model, version 0."""

    source: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """A local folder, a Hub id, or a name the offline package knows."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the published weights. The trainer keeps fp32 masters."""


class EnvSpec(WireModel):
    """The world, and how episodes are shaped."""

    name: str = ""
    max_turns: int = Field(1, ge=1)
    max_tokens: int = Field(1024, ge=1)
    """Of one sequence, prompt included."""
    sessions: int = Field(64, ge=1)
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the world."""


class LoraSpec(WireModel):
    """Train a low-rank adapter and leave the base model as it is."""

    rank: int = Field(16, ge=1, le=512)
    alpha: float | None = Field(None, gt=0)
    """The adapter is scaled by alpha / rank; twice the rank when not given."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get one, such as q_proj; all-linear leaves out the output head."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank), for high ranks."""


class TrainSpec(WireModel):
    """The optimisation."""

    steps: int = Field(40, ge=1)
    groups_per_step: int = Field(4, ge=1)
    group_size: int = Field(8, ge=1)
    algorithm: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "cispo", "gspo"] = "grpo"
    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    credit: Literal["episode", "turn", "token"] = "episode"
    """Which scores inside an episode count beside its reward: none, those of its turns, or those
    of its tokens."""
    credit_weight: float = 1.0
    """What they weigh against the episode's advantage."""
    max_staleness: int = Field(2, ge=0)
    oversample_groups: int = Field(0, ge=0)
    """Groups ordered beyond those needed: a step takes the first to come home."""
    correction: Literal[
        "none",
        "clip",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_mask",
        "opsm",
        "decoupled",
    ] = "token_truncate"
    correction_cap: float = 2.0
    guard: bool = True
    tokens_per_microbatch: int = Field(4096, ge=1)
    gradient_checkpointing: bool = False
    autocast: bool = True
    """bf16 matrix products under fp32 masters."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints. Those since the last one are made again from the journal."""
    seed: int = 0
    min_group: int = Field(2, ge=1)
    """Train on a group when at least this many of its rollouts are usable."""
    agents: list[str] = Field(default_factory=list)
    """Which agents' sequences are trained on, in a world with several; none named: all."""
    lora: LoraSpec | None = None
    """None trains all weights. Any of its settings, or `true`, switches it on."""


class SyncSpec(WireModel):
    """How weights travel."""

    encoding: Literal["auto", "seed", "compact", "classes"] = "auto"
    anchor_every: int | None = None
    """Fixed cadence; None is adaptive."""
    anchor_packed: bool = True
    mode: Literal["keep", "keep_kv", "drain", "abort"] = "keep"
    sync_every: int = Field(1, ge=1)
    """Optimizer steps between two published versions."""
    keep_versions: int = Field(64, ge=1)
    """Versions whose objects are kept at least."""
    skip_levels: list[Annotated[int, Field(ge=2)]] = Field(default_factory=list)
    """Also publish files that lead over so many versions at once, [8], for replicas that lag."""


class EvalSpec(WireModel):
    """Evaluation beside training, on a held-out split."""

    every: int = Field(10, ge=1)
    episodes: int = Field(32, ge=1)
    split: str = "eval"
    temperature: float = Field(0.0, ge=0.0)


class JobSpec(WireModel):
    """The resolved job."""

    name: str
    model: ModelSpec = ModelSpec()
    env: EnvSpec = EnvSpec()
    sampling: Sampling = Sampling()
    train: TrainSpec = TrainSpec()
    sync: SyncSpec = SyncSpec()
    eval: EvalSpec | None = None
    rewards: list[str] = Field(default_factory=list)
    """Names and weights for people, `solved*1.0`; empty when the world owns the reward."""
    show: list[str] = Field(default_factory=list)
    """Metrics of the world to show beside the reward."""
