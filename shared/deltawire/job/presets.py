"""What is sensible for a model of some size: starting values that a job overrides."""

import re
from dataclasses import dataclass
from pathlib import Path

MILLION, BILLION = 10**6, 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Values by dotted name, for models up to a size."""

    name: str
    up_to_parameters: float
    values: dict[str, object]


PRESETS = (
    Preset(
        name="tiny",
        up_to_parameters=60 * MILLION,
        values={"train.lr": 1e-4, "train.warmup_steps": 5},
    ),
    Preset(
        name="small",
        up_to_parameters=500 * MILLION,
        values={"train.lr": 1e-5, "train.warmup_steps": 10},
    ),
    Preset(
        name="medium",
        up_to_parameters=2 * BILLION,
        values={
            "train.lr": 2e-6,
            "train.warmup_steps": 10,
            "train.groups_per_step": 8,
            "train.group_size": 16,
            "sampling.max_new_tokens": 512,
            "env.max_tokens": 2048,
        },
    ),
    Preset(
        name="large",
        up_to_parameters=15 * BILLION,
        values={
            "train.lr": 1e-6,
            "train.warmup_steps": 10,
            "train.groups_per_step": 16,
            "train.group_size": 16,
            "train.tokens_per_microbatch": 8192,
            "train.gradient_checkpointing": True,
            "sampling.max_new_tokens": 1024,
            "env.max_tokens": 4096,
        },
    ),
    Preset(
        name="huge",
        up_to_parameters=float("inf"),
        values={
            "train.lr": 5e-7,
            "train.warmup_steps": 20,
            "train.groups_per_step": 32,
            "train.group_size": 16,
            "train.tokens_per_microbatch": 8192,
            "train.gradient_checkpointing": True,
            "sampling.max_new_tokens": 2048,
            "env.max_tokens": 8192,
        },
    ),
)

_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)\s?([MmBb])(?![A-Za-z0-9])")
_BYTES_PER_PARAMETER = 2


def parameters_of(source: str) -> float | None:
    """How many parameters a model has, by its files or by its name; None when neither tells.

    Example: ``parameters_of("Qwen/Qwen3-0.6B") == 6e8``.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if size_bytes:
            return size_bytes / _BYTES_PER_PARAMETER
    found = _SIZE_IN_NAME.findall(source.rpartition("/")[2])
    if not found:
        return None
    number, unit = found[-1]
    return float(number) * (BILLION if unit in "bB" else MILLION)


def preset_for(parameters: float | None) -> Preset:
    """The preset for a size; `medium` when it is not known."""
    if parameters is None:
        return preset_named("medium")
    return next(preset for preset in PRESETS if parameters <= preset.up_to_parameters)


def preset_named(name: str) -> Preset:
    """A preset by its name. Raises KeyError."""
    return {preset.name: preset for preset in PRESETS}[name]
