"""Wiring for runs inside a test: job, settings, players, and a trainer that may vanish."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from deltawire.job.spec import EnvSpec, JobSpec, ModelSpec, SyncSpec, TrainSpec
from deltawire.protocol.control import StepRecord, TrainerStatus
from deltawire.protocol.generation import Sampling
from deltawire.protocol.versions import PolicyVersion
from deltawire.service.metrics import Metrics
from deltawire.store.open import open_store
from deltawire.streams.base import TrainerStreams
from deltawire_trainer.events import EventHub
from deltawire_trainer.rollout_log import RolloutLog
from deltawire_trainer.service import train
from deltawire_trainer.settings import TrainerSettings
from deltawire_trainer.trainer import Trainer

from .player import LENGTH, Player

RUN = "r1"


def make_job(base: Path, **train_options: object) -> JobSpec:
    options = {
        "steps": 6,
        "groups_per_step": 2,
        "group_size": 4,
        "lr": 1e-3,
        "max_staleness": 1,
        "autocast": False,
        "guard": False,
        **train_options,
    }
    return JobSpec(
        name="again",
        model=ModelSpec(source=str(base)),
        env=EnvSpec(max_turns=1),
        sampling=Sampling(max_new_tokens=LENGTH),
        train=TrainSpec.model_validate(options),
        sync=SyncSpec(),
    )


def make_settings(tmp_path: Path, **options: object) -> TrainerSettings:
    return TrainerSettings.model_validate(
        {
            "run_id": RUN,
            "store": f"file://{tmp_path}/bucket",
            "streams": "memory://x",
            "run_dir": tmp_path / "run",
            "converge_timeout_s": 10.0,
            **options,
        }
    )


@asynccontextmanager
async def playing(*players: Player) -> AsyncIterator[None]:
    """Players at work; one that fails fails the test."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(player.run()) for player in players]
        yield
        for player, task in zip(players, tasks, strict=True):
            player.stopped = True
            task.cancel()


def make_trainer(settings: TrainerSettings, job: JobSpec) -> Trainer:
    return Trainer(
        run_id=RUN,
        job=job,
        model="tiny",
        store=open_store(settings.store),
        events=EventHub(),
        rollouts=RolloutLog(settings.run_dir / "rollouts"),
    )


async def train_to_the_end(
    settings: TrainerSettings,
    job: JobSpec,
    streams: TrainerStreams,
    *,
    vanish_after: int | None = None,
) -> TrainerStatus:
    """Train, or stop dead once a step's version is committed: nothing is finished or acked."""
    trainer = make_trainer(settings, job)
    store, metrics = open_store(settings.store), Metrics("trainer")
    running = asyncio.create_task(train(trainer, settings, store, streams, metrics))
    while not running.done():
        await asyncio.sleep(0.01)
        if vanish_after is not None and await _committed(trainer) >= vanish_after:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    return await trainer.status()


async def _committed(trainer: Trainer) -> int:
    history = (await trainer.status()).history
    return max((record.step for record in history if record.sync is not None), default=0)


def blank_record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        version=PolicyVersion(step),
        reward=0.0,
        reward_std=0.0,
        staleness=0.0,
        staleness_max=0,
        groups=1,
        rollouts=1,
        tokens=1,
        loss=0.0,
        grad_norm=0.0,
        lr=0.0,
        ess=1.0,
        mismatch_kl=0.0,
    )
