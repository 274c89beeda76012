"""What a job will need: memory at both ends, bytes a step. Rough on purpose, from the model's size.

Sizes per parameter: fp32 masters 4, Adam's two moments 8, gradients 4, the published bf16 view 2.
A change of the `compact` encoding takes 10.8 bits (measured, docs/design.md).
"""

from dataclasses import dataclass

from deltawire.job.presets import parameters_of
from deltawire.job.spec import JobSpec

_TRAINER_BYTES, _LORA_TRAINER_BYTES, _REPLICA_BYTES, _ANCHOR_BYTES = 18, 4, 2, 2
_BITS_PER_CHANGE = 10.8
TYPICAL_DENSITY = 0.02
"""Share of bf16 weights that change in one step at a usual learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes, and rollouts a step."""

    parameters: float
    trainer_bytes: float
    replica_bytes: float
    anchor_bytes: float
    delta_bytes: float
    rollouts_per_step: int
    tokens_per_step: int
    """At most: every rollout as long as it may be."""


def estimate(spec: JobSpec) -> Estimate | None:
    """The estimate for a job; None when the model's size cannot be told without its files."""
    parameters = parameters_of(spec.model.source)
    if parameters is None:
        return None
    per_parameter = _LORA_TRAINER_BYTES if spec.train.lora else _TRAINER_BYTES
    rollouts = spec.train.groups_per_step * spec.train.group_size
    return Estimate(
        parameters=parameters,
        trainer_bytes=parameters * per_parameter,
        replica_bytes=parameters * _REPLICA_BYTES,
        anchor_bytes=parameters * _ANCHOR_BYTES,
        delta_bytes=parameters * TYPICAL_DENSITY * _BITS_PER_CHANGE / 8,
        rollouts_per_step=rollouts,
        tokens_per_step=rollouts * spec.env.max_tokens,
    )


def readable_bytes(count: float) -> str:
    """`1.9 GB`, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
