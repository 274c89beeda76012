"""Open a run: model, optimizer, checkpoint, journal and publisher, in the order they need each
other. Slow and synchronous; the service answers /status meanwhile from another thread."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from deltawire.job.spec import JobSpec, LoraSpec
from deltawire.protocol.errors import SettingsError
from deltawire.store.base import Store
from deltawire.sync.publisher import Publisher
from deltawire_trainer.base_model import resolve_base_model
from deltawire_trainer.checkpoints import Checkpoints
from deltawire_trainer.journal import Journal, TakenOver
from deltawire_trainer.learner import Learner
from deltawire_trainer.memory import training_memory
from deltawire_trainer.optimizer import build_optimizer
from deltawire_trainer.policy import Policy, Reference
from deltawire_trainer.resume import Recovered, adopt_head, recover
from deltawire_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_PUBLISHED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_MODEL_FILE_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model"})
_NOT_PUBLISHED = frozenset({"model.safetensors.index.json"})
"""Describes weight files that the bucket does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run that is ready to train, at the state of its newest checkpoint."""

    job: JobSpec
    learner: Learner
    publisher: Publisher
    checkpoints: Checkpoints
    journal: Journal
    recovered: Recovered
    step: int
    """Optimizer steps that masters and optimizer contain."""
    took_over: bool
    """Whether masters come from the bucket's head, because no journal told of its steps."""

    @property
    def policy(self) -> Policy:
        """What is trained."""
        return self.learner.policy

    def close(self) -> None:
        """Let go of files and background work."""
        self.publisher.close()
        self.journal.close()


def open_run(settings: TrainerSettings, job: JobSpec, store: Store) -> OpenRun:
    """Found the run, resume it, or take it over. Raises children of DeltawireError only."""
    base = resolve_base_model(settings.model or job.model.source, cache=settings.cache_dir)
    device = usable_device(settings.device)
    policy = _load_policy(base, job, device=device, lora=job.train.lora)
    optimizer = build_optimizer(policy, job.train)
    checkpoints = Checkpoints(settings.run_dir / "checkpoints")
    newest = checkpoints.newest()
    held = checkpoints.restore(newest, policy=policy, optimizer=optimizer) if newest else None
    step = held.step if held else 0
    journal = Journal(settings.run_dir / "journal.jsonl")
    try:
        recovered = recover(journal.events(), checkpoint_step=step)
        publisher = _open_publisher(settings, job, store, policy, base)
    except BaseException:
        journal.close()
        raise
    took_over = publisher.version > 0 and not recovered.steps
    if took_over:
        step = publisher.version * job.sync.sync_every
        recovered.lineage, recovered.tickets = f"-e{publisher.head.epoch}", 0
        adopt_head(publisher, policy)
        journal.append(TakenOver(step=step, lineage=recovered.lineage))
    log.info(
        "run opened",
        extra={
            "run_id": settings.run_id,
            "step": step,
            "version": publisher.version,
            **training_memory(policy).model_dump(),
        },
    )
    return OpenRun(
        job=job,
        learner=Learner(
            policy,
            optimizer,
            job.train,
            max_tokens=job.sampling.max_new_tokens * job.env.max_turns,
            reference=_reference(policy, base, job),
        ),
        publisher=publisher,
        checkpoints=checkpoints,
        journal=journal,
        recovered=recovered,
        step=step,
        took_over=took_over,
    )


def working_dtype(job: JobSpec) -> torch.dtype:
    """bf16 where that is what is published; other dtypes are computed in full precision."""
    mixed = job.train.autocast and job.model.dtype == "bfloat16"
    return torch.bfloat16 if mixed else torch.float32


def usable_device(name: str) -> str:
    """The same name. Raises SettingsError when nothing can be computed there."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch has no one error for it
        reason = str(error).splitlines()[0]
        raise SettingsError(
            f"TRAINER_DEVICE={name}: {reason}; use cpu or a device you have"
        ) from error
    return name


def _load_policy(base: Path, job: JobSpec, *, device: str, lora: LoraSpec | None = None) -> Policy:
    return Policy.load(
        base,
        working_dtype=working_dtype(job),
        temperature=job.sampling.temperature,
        gradient_checkpointing=job.train.gradient_checkpointing,
        device=device,
        lora=lora,
        seed=job.train.seed,
        base_model=job.model.source,
    )


def _reference(policy: Policy, base: Path, job: JobSpec) -> Reference | None:
    """What the KL penalty pulls towards: version 0, which lies under an adapter anyway."""
    if not job.train.kl_coef:
        return None
    if policy.adapter is not None:
        return policy.base()
    return _load_policy(base, job, device=str(policy.device))


def _open_publisher(
    settings: TrainerSettings, job: JobSpec, store: Store, policy: Policy, base: Path
) -> Publisher:
    return Publisher.open(
        store,
        run_id=settings.run_id,
        named_tensors=policy.published(),
        base_model=job.model.source,
        model_files=model_files(base),
        master_dtype=_PUBLISHED[job.model.dtype],
        encoding=job.sync.encoding,
        anchor_every=job.sync.anchor_every,
        anchor_packed=job.sync.anchor_packed,
        keep_versions=job.sync.keep_versions,
        skip_levels=job.sync.skip_levels,
        swap_mode=job.sync.mode,
        adapter=policy.adapter,
        owner_file=settings.run_dir / "owner",
        take_over=settings.take_over,
    )


def model_files(base: Path) -> dict[str, Path]:
    """Configuration and tokenizer of a model folder: all that a replica needs beside weights."""
    return {
        path.name: path
        for path in sorted(base.iterdir())
        if path.suffix in _MODEL_FILE_SUFFIXES
        and path.name not in _NOT_PUBLISHED
        and not path.name.startswith(".")
    }
