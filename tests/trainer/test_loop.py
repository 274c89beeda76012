"""The loop against real streams and a real bucket, with a tiny model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from deltawire.job.spec import EnvSpec, JobSpec, ModelSpec, SyncSpec, TrainSpec
from deltawire.protocol.control import TrainerStatus
from deltawire.protocol.generation import Sampling
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams
from deltawire_trainer.events import EventHub
from deltawire_trainer.rollout_log import RolloutLog
from deltawire_trainer.service import train
from deltawire_trainer.settings import TrainerSettings
from deltawire_trainer.trainer import Trainer

from .conftest import tiny_llama
from .player import LENGTH, Player

RUN = "r1"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    tiny_llama().bfloat16().save_pretrained(folder)
    return folder


def make_job(base: Path, **train_options: object) -> JobSpec:
    options = {
        "steps": 6,
        "groups_per_step": 2,
        "group_size": 4,
        "lr": 1e-3,
        "max_staleness": 1,
        "autocast": False,
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
    tasks = [asyncio.create_task(player.run()) for player in players]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def train_to_the_end(
    settings: TrainerSettings, job: JobSpec, streams: MemoryStreams
) -> TrainerStatus:
    store = open_store(settings.store)
    trainer = Trainer(
        run_id=RUN,
        job=job,
        model="tiny",
        store=store,
        events=EventHub(),
        rollouts=RolloutLog(settings.run_dir / "rollouts"),
    )
    await train(trainer, settings, store, streams)
    return await trainer.status()


async def test_a_run_trains_to_its_end_and_accounts_for_every_group(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    player = Player(open_store(settings.store), streams, run_id=RUN, folder=tmp_path / "replica")

    async with playing(player):
        status = await train_to_the_end(settings, make_job(base), streams)

    assert status.state == "finished", status.reason
    assert status.step == 6
    assert [record.version for record in status.history] == [1, 2, 3, 4, 5, 6]
    assert all(record.sync is not None for record in status.history)
    counts = status.groups
    assert counts.trained == 12
    assert (counts.open, counts.lost, counts.doubled) == (0, 0, 0)
    assert counts.issued == counts.trained + sum(counts.dropped.values())
    (replica,) = status.replicas
    assert (replica.version, replica.digest) == (status.version, status.digest)
    assert status.version == PolicyVersion(6)
