"""The loop against real streams and a real bucket, with a tiny model."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from deltawire.protocol.errors import Fenced, StoreUnavailable
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Ticket
from deltawire.protocol.versions import PolicyVersion
from deltawire.service.metrics import Metrics
from deltawire.store.base import ObjectInfo, Store
from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams
from deltawire_trainer.guard import PATIENCE
from deltawire_trainer.service import train

from .player import Player
from .rig import RUN, make_job, make_settings, make_trainer, playing, train_to_the_end


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


class _Liar(Player):
    """Its engine reports logprobs that have nothing to do with the policy."""

    def group(self, ticket: Ticket) -> RolloutGroup:
        told = super().group(ticket)
        return told.model_copy(
            update={"rollouts": [_lie(rollout, n) for n, rollout in enumerate(told.rollouts)]}
        )


def _lie(rollout: Rollout, number: int) -> Rollout:
    """Each number another reward, so that there is something to learn."""
    (sequence,) = rollout.sequences
    logprobs = [
        logprob - 5.0 * trained
        for logprob, trained in zip(sequence.logprobs, sequence.loss_mask, strict=True)
    ]
    told = sequence.model_copy(update={"logprobs": logprobs, "reward": float(number)})
    return rollout.model_copy(update={"sequences": [told], "reward": float(number)})


async def test_a_run_that_the_guard_stops_ends_in_order_and_with_an_error(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    job = make_job(base, steps=9, guard=True, max_staleness=0)
    trainer = make_trainer(settings, job)
    store = open_store(settings.store)
    player = _Liar(store, streams, run_id=RUN, folder=tmp_path / "replica")

    async with playing(player):
        code = await train(trainer, settings, store, streams, Metrics("trainer"))

    assert code == 2
    status = await trainer.status()
    assert (status.state, status.step) == ("failed", PATIENCE)
    assert "GuardStopped: engine mismatch" in status.reason
    assert (status.groups.open, status.groups.lost) == (0, 0)
    assert status.version == PATIENCE


async def test_a_ticket_that_was_set_aside_is_replaced_and_named(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(max_deliveries=0), make_settings(tmp_path)
    trainer = make_trainer(settings, make_job(base))
    store = open_store(settings.store)
    running = asyncio.create_task(train(trainer, settings, store, streams, Metrics("trainer")))
    async with asyncio.timeout(60.0):
        while not (await trainer.status()).dead_letters:
            await streams.claim("p", timeout_s=0.05)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running

    status = await trainer.status()
    (reason,) = status.groups.dropped
    assert reason == "dead_letter: delivered too often"
    assert status.dead_letters[0].id == "r1-000000"
    assert status.groups.issued > status.groups.dropped[reason]


class _BrokenStore:
    """A bucket whose client fails, from some version on, in a way that nobody expected."""

    def __init__(self, inner: Store, error: Exception) -> None:
        self._inner, self._error = inner, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, source: Path) -> ObjectInfo:
        if "deltas/step_000002" in key:
            raise self._error
        return self._inner.put(key, source)


@pytest.mark.parametrize("error", [Fenced("taken over"), RuntimeError("a bug in a client")])
async def test_a_run_that_can_publish_no_more_ends_and_does_not_wait_for_rollouts(
    tmp_path: Path, base: Path, error: Exception
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    job = make_job(base, max_staleness=0)  # no rollout comes before the version is published
    trainer, inner = make_trainer(settings, job), open_store(settings.store)
    player = Player(inner, streams, run_id=RUN, folder=tmp_path / "replica")

    async with playing(player), asyncio.timeout(120):
        store = cast("Store", _BrokenStore(inner, error))
        code = await train(trainer, settings, store, streams, Metrics("trainer"))

    assert code == (2 if isinstance(error, Fenced) else 1)
    assert str(error) in (await trainer.status()).reason


class _Refusing:
    """A bucket that takes no delta while it is told so."""

    def __init__(self, inner: Store) -> None:
        self._inner, self.refuses = inner, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, source: Path) -> ObjectInfo:
        if self.refuses and "deltas/" in key:
            raise StoreUnavailable("away")
        return self._inner.put(key, source)


async def test_a_sync_that_reaches_no_bucket_is_an_error_and_the_next_one_publishes(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    trainer, inner = make_trainer(settings, make_job(base)), open_store(settings.store)
    store = _Refusing(inner)
    # Enough for one step and no more.
    player = Player(inner, streams, run_id=RUN, folder=tmp_path / "replica", groups=2)

    async with playing(player), asyncio.timeout(120):
        running = asyncio.create_task(
            train(trainer, settings, cast("Store", store), streams, Metrics("trainer"))
        )
        while (await trainer.status()).step < 1:  # noqa: ASYNC110 - the trainer tells nobody
            await asyncio.sleep(0.01)
        with pytest.raises(StoreUnavailable, match="version 1"):
            await trainer.running().sync_now()
        store.refuses = False
        notice = await trainer.running().sync_now()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    assert notice is not None
    assert notice.version == 1


class _AwayStore:
    """A bucket that goes away in the middle of a commit, written or not, and stays away a while."""

    def __init__(self, inner: Store, *, written: bool) -> None:
        self._inner, self._written = inner, written
        self.swaps, self.refusals = 0, 5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def swap(self, key: str, body: bytes, *, expect: str | None) -> ObjectInfo:
        self.swaps += 1
        if self.swaps != _SECOND_VERSION:
            return self._inner.swap(key, body, expect=expect)
        if self._written:
            self._inner.swap(key, body, expect=expect)
        raise StoreUnavailable("the answer was lost")

    def read(self, key: str, **options: int) -> tuple[bytes, ObjectInfo]:
        if self.swaps >= _SECOND_VERSION and self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("still away")
        return self._inner.read(key, **options)


_SECOND_VERSION = 4
"""Writes of latest.json before: the claim, version 0 and version 1."""


@pytest.mark.parametrize("written", [True, False])
async def test_a_bucket_that_goes_away_in_a_commit_only_delays_the_run(
    tmp_path: Path, base: Path, written: bool
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    job = make_job(base, steps=3, max_staleness=0)
    trainer, inner = make_trainer(settings, job), open_store(settings.store)
    store = _AwayStore(inner, written=written)
    player = Player(inner, streams, run_id=RUN, folder=tmp_path / "replica")

    async with playing(player), asyncio.timeout(120):
        metrics = Metrics("trainer")
        assert await train(trainer, settings, cast("Store", store), streams, metrics) == 0

    status = await trainer.status()
    assert store.refusals == 0 and status.step == 3
    assert (player.version, player.digest) == (status.version, status.digest)
