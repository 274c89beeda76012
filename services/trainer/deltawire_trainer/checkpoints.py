"""Checkpoints: fp32 masters, optimizer, schedule position, RNG and versions, whole or not at all.

A folder `step_000010/` with model.safetensors, optimizer.safetensors and state.json, written under
another name and renamed when complete. Nothing is pickled. Tensors are written straight from the
masters: the caller keeps them still meanwhile (see learner.py), and no copy is made.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from deltawire.protocol.errors import StoreError
from deltawire.protocol.wire_model import WireModel
from deltawire_trainer.policy import Policy

CHECKPOINT_SCHEMA = 1
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEEP = 2
"""Complete checkpoints kept; the older one is for a disk that lies."""


class CheckpointState(WireModel):
    """What is not a tensor."""

    schema_number: int = CHECKPOINT_SCHEMA
    run_id: str
    step: int
    """Optimizer steps done. The learning-rate schedule and Adam's count follow from it."""
    version: int
    """The policy version published from these weights or, between two syncs, before them."""
    adam_step: float
    rng: str
    """torch's CPU generator state, hex."""


class Checkpoints:
    """The checkpoint folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return max(self._complete(), key=_step_of, default=None)

    def write(
        self,
        *,
        run_id: str,
        step: int,
        version: int,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
    ) -> Path:
        """Write one, and remove those too old to be needed. Masters must not change meanwhile.

        Raises StoreError when the disk does not take it; the ones before stay.
        """
        target = self.folder / f"step_{step:06d}"
        scratch = self.folder / f".{target.name}.tmp"
        masters = policy.masters
        moments, adam_step = _moments(masters, optimizer)
        state = CheckpointState(
            run_id=run_id,
            step=step,
            version=version,
            adam_step=adam_step,
            rng=bytes(torch.get_rng_state().tolist()).hex(),
        )
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            save_file({n: p.detach() for n, p in masters.items()}, scratch / _MODEL)
            save_file(moments, scratch / _OPTIMIZER)
            (scratch / _STATE).write_text(state.model_dump_json(indent=1))
            _sync([scratch / _MODEL, scratch / _OPTIMIZER, scratch / _STATE])
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise StoreError(
                f"checkpoint of step {step} could not be written to {self.folder}: {error}"
            ) from error
        for old in sorted(self._complete(), key=_step_of)[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def restore(
        self, path: Path, *, policy: Policy, optimizer: torch.optim.Optimizer
    ) -> CheckpointState:
        """Put a checkpoint back into the policy and its optimizer. Raises StoreError."""
        try:
            state = CheckpointState.model_validate_json((path / _STATE).read_text())
            weights = load_file(path / _MODEL)
            moments = load_file(path / _OPTIMIZER)
            masters = policy.masters
            with torch.no_grad():
                for name, master in masters.items():
                    master.copy_(weights[name])
            policy.refresh()
            _put_moments(masters, optimizer, moments, state.adam_step)
            torch.set_rng_state(torch.tensor(list(bytes.fromhex(state.rng)), dtype=torch.uint8))
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise StoreError(f"checkpoint {path} cannot be read: {error}; remove it") from error
        return state

    def _complete(self) -> Iterable[Path]:
        return [path for path in self.folder.glob("step_*") if (path / _STATE).is_file()]


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _moments(
    masters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], float]:
    """AdamW's moments by parameter name, and how many updates it has made."""
    tensors: dict[str, torch.Tensor] = {}
    steps = [0.0]
    for name, master in masters.items():
        held = optimizer.state.get(master, {})
        tensors |= {f"{name}.{moment}": held[moment] for moment in _MOMENTS if moment in held}
        if "step" in held:
            steps.append(float(held["step"]))
    return tensors, max(steps)


def _put_moments(
    masters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    moments: dict[str, torch.Tensor],
    adam_step: float,
) -> None:
    for name, master in masters.items():
        if f"{name}.{_MOMENTS[0]}" in moments:
            held = {moment: moments[f"{name}.{moment}"].to(master.device) for moment in _MOMENTS}
            made = torch.tensor(adam_step, device=master.device)
            optimizer.state[master] = {**held, "step": made}


def _sync(paths: Iterable[Path]) -> None:
    """Push files to the disk before their folder takes its name."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
