"""A low-rank adapter on a model, through `peft`: which parameters it has, and how to go without it.

Parameters are named by PEFT's keys, as they travel and as `peft` saves them.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from deltawire.job.spec import LoraSpec
from deltawire.protocol.adapters import AdapterManifest, adapter_part
from deltawire.protocol.errors import SettingsError

_ADAPTER = "default"
"""What `peft` calls the one adapter of this model."""
_PREFIX = "base_model.model."


class Lora:
    """The adapter of one model. The model's layers hold it from here on; its base is frozen."""

    def __init__(
        self, model: PreTrainedModel, spec: LoraSpec, *, seed: int = 0, base_model: str = ""
    ) -> None:
        """Raises SettingsError when there are no such layers, or `peft` is not installed."""
        self._peft = _wrapped(model, spec, seed=seed)
        self.parameters: dict[str, torch.nn.Parameter] = {
            _PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        """Trainable parameters by PEFT's key. The first ones of B are 0: version 0 is the base."""
        self.manifest = AdapterManifest(
            rank=spec.rank,
            alpha=_alpha(spec),
            rank_stabilised=spec.rank_stabilised,
            targets=self._targets(model),
            base_model=base_model,
        )

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The model is the base model for as long as the block lasts."""
        with self._peft.disable_adapter():
            yield

    def _targets(self, model: PreTrainedModel) -> list[str]:
        """Last parts of the adapted layers' names; SettingsError for a layer that is not linear."""
        found = set()
        for name in self.parameters:
            part = adapter_part(name)
            if part is None or not _is_linear(model.get_submodule(part.module)):
                raise SettingsError(
                    f"train.lora.targets: {name} adapts something else than a linear layer, which "
                    "replicas cannot serve; name linear layers"
                )
            found.add(part.module.rpartition(".")[2])
        return sorted(found)


def _is_linear(adapted: torch.nn.Module) -> bool:
    return isinstance(adapted.get_submodule("base_layer"), torch.nn.Linear)


def _wrapped(model: PreTrainedModel, spec: LoraSpec, *, seed: int) -> Any:
    """The model inside `peft`'s; its layers are replaced in place."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SettingsError(
            "train.lora needs peft: pip install 'deltawire-trainer[lora]'"
        ) from error
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=_alpha(spec),
        lora_dropout=0.0,
        target_modules=spec.targets,
        use_rslora=spec.rank_stabilised,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers for a property under its old name.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise SettingsError(f"train.lora.targets={spec.targets!r}: {error}") from error


def _alpha(spec: LoraSpec) -> float:
    return 2.0 * spec.rank if spec.alpha is None else spec.alpha
