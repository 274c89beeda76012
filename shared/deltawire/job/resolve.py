"""A Job, a preset and overrides become a JobSpec, and each value remembers where it came from.

Later wins: default, preset, job file, command line. Unknown names are errors with a suggestion.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, JsonValue, ValidationError

from deltawire.job.custom import open_rows
from deltawire.job.dataset import DatasetWorld
from deltawire.job.job import Env, Job, Model
from deltawire.job.presets import PRESETS, Preset, parameters_of, preset_for, preset_named
from deltawire.job.registry import make_world, world_name
from deltawire.job.spec import EvalSpec, JobSpec, LoraSpec, TrainSpec
from deltawire.job.suggestion import unknown
from deltawire.job.world import World
from deltawire.protocol.errors import JobError

_FREE = "env.config."
"""Below it any name may be set; the world judges it."""
_LORA = "train.lora"
_LORA_LR_FACTOR = 10
"""A preset's learning rate is for all weights; an adapter's best one is about ten times as high
(Schulman et al. 2025, LoRA Without Regret)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob:
    """The job as it will run."""

    job: Job
    spec: JobSpec
    origins: dict[str, str]
    """Dotted name -> `default`, `preset small`, `job file` or `command line`."""
    world: World


def resolve(job: Job, overrides: Sequence[str] = ()) -> ResolvedJob:
    """Put the layers on top of each other. Raises JobError naming the layer and the name.

    Example: ``resolve(job, ["train.lr=2e-6", "model=Qwen/Qwen3-0.6B"])``.
    """
    env = job.env if isinstance(job.env, Env) else Env(job.env)
    model = Model(job.model) if isinstance(job.model, str) else job.model
    from_file = dict(_from_file(job, env, model))
    from_line = dict(pair for text in overrides for pair in _expanded(*_override(text)))
    preset = _preset(model, str(from_line.get("model.source", model.source)))
    layers = (
        (f"preset {preset.name}", preset.values),
        ("job file", from_file),
        ("command line", from_line),
    )
    values: dict[str, object] = {}
    origins = {name: "default" for name, _ in leaves(JobSpec(name=job.name))}
    for origin, layer in layers:
        for name, value in layer.items():
            _put(values, name, value)
            origins[name] = origin
    if values.get(_LORA) is not None or _mentions(values, f"{_LORA}."):
        _raise_preset_lr(values, origins)
    spec = _spec(values, has_eval=job.eval is not None or _mentions(from_line, "eval."))
    given = "env.max_turns" in values
    world = make_world(
        env.world,
        spec.env.config,
        max_turns=spec.env.max_turns if given else None,
        rows=open_rows(env.dataset, job.folder),
    )
    if not given and world.max_turns != spec.env.max_turns:
        shaped = spec.env.model_copy(update={"max_turns": world.max_turns})
        spec = spec.model_copy(update={"env": shaped})
        origins["env.max_turns"] = "world"
    _check_reward(job, world)
    return ResolvedJob(job=job, spec=spec, origins=origins, world=world)


def _check_reward(job: Job, world: World) -> None:
    if isinstance(world, DatasetWorld) and world.config.answer is None and not job.rewards:
        raise JobError(
            "a data set has no reward of its own: give rewards=[...], or name its answer column "
            "as Env(dataset=..., answer=...)"
        )


def leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every setting of a spec by its dotted name."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def setting_names() -> list[str]:
    """Every dotted name that may be set, evaluation and LoRA included."""
    everything = JobSpec(name="any", eval=EvalSpec(), train=TrainSpec(lora=LoraSpec()))
    return [*(name for name, _ in leaves(everything)), _LORA]


def _from_file(job: Job, env: Env, model: Model) -> Iterator[tuple[str, object]]:
    yield "name", job.name
    yield "env.name", world_name(env.world)
    if job.rewards:
        yield "rewards", [f"{part.name}*{part.weight:g}" for part in job.rewarders]
    yield "model.source", model.source
    if job.show:
        yield "show", list(job.show)
    if model.dtype is not None:
        yield "model.dtype", model.dtype
    for name in ("max_turns", "max_tokens", "sessions"):
        if (value := getattr(env, name)) is not None:
            yield f"env.{name}", value
    for name, argument in env.config.items():
        yield f"env.config.{name}", argument
    known = setting_names()
    for section in ("sampling", "train", "sync", "eval"):
        for name, value in (getattr(job, section) or {}).items():
            for path, part in _expanded(f"{section}.{name}", value):
                if path not in known:
                    raise JobError(unknown("in the job file, setting", path, known))
                yield path, part


def _expanded(name: str, value: object) -> Iterator[tuple[str, object]]:
    """`train.lora` may be given as a whole: its settings one by one, `{}` to switch it on with
    defaults, None to switch it off."""
    if name != _LORA:
        yield name, value
    elif isinstance(value, Mapping) and value:
        yield from ((f"{_LORA}.{key}", part) for key, part in value.items())
    else:
        yield name, {} if value is True or value == {} else value or None


def _put(values: dict[str, object], name: str, value: object) -> None:
    """Set one name. A section set as a whole replaces its settings, and the other way round; `{}`
    leaves them."""
    below = [known for known in values if known.startswith(f"{name}.")]
    if below and value == {}:
        return
    above = [known for known in values if name.startswith(f"{known}.")]
    for known in [*below, *above]:
        del values[known]
    values[name] = value


def _raise_preset_lr(values: dict[str, object], origins: dict[str, str]) -> None:
    lr, origin = values["train.lr"], origins["train.lr"]
    if isinstance(lr, float) and origin.startswith("preset"):
        values["train.lr"] = _LORA_LR_FACTOR * lr
        origins["train.lr"] = f"{origin}, {_LORA_LR_FACTOR} times it for LoRA"


def _override(text: str) -> tuple[str, JsonValue]:
    name, equals, value = text.partition("=")
    name = {"model": "model.source"}.get(name.strip(), name.strip())
    if not equals:
        raise JobError(f"override {text!r} is not name=value, such as train.lr=2e-6")
    known = setting_names()
    if name not in known and not name.startswith(_FREE):
        raise JobError(unknown("override", name, known))
    return name, _parse(value.strip())


def _parse(text: str) -> JsonValue:
    try:
        parsed: JsonValue = json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
    return parsed


def _preset(model: Model, source: str) -> Preset:
    if model.preset is None:
        return preset_for(parameters_of(source))
    try:
        return preset_named(model.preset)
    except KeyError:
        names = [preset.name for preset in PRESETS]
        raise JobError(unknown("preset", model.preset, names)) from None


def _mentions(layer: Mapping[str, object], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in layer)


def _spec(values: Mapping[str, object], *, has_eval: bool) -> JobSpec:
    nested: dict[str, object] = {"eval": {} if has_eval else None}
    for name, value in values.items():
        *folders, leaf = name.split(".")
        at = nested
        for folder in folders:
            inner = at.setdefault(folder, {})
            assert isinstance(inner, dict)
            at = inner
        at[leaf] = dict(value) if isinstance(value, Mapping) else value
    try:
        return JobSpec.model_validate(nested)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}, found {item['input']!r}"
            for item in error.errors(include_url=False)
        ]
        raise JobError("; ".join(lines)) from None
