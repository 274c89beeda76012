"""A trainer that comes back: same weights, no group twice, none lost, versions without a gap."""

import asyncio
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from deltawire.codec.bits import bits_of
from deltawire.job.spec import TrainSpec
from deltawire.protocol.control import SyncRecord, TrainerStatus
from deltawire.protocol.errors import MalformedMessage, StoreError, StreamUnavailable
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence, Ticket
from deltawire.protocol.versions import PolicyVersion, VersionSpan
from deltawire.service.metrics import Metrics
from deltawire.store.open import open_store
from deltawire.streams.base import ProducerStreams
from deltawire.streams.memory import MemoryStreams
from deltawire_trainer.checkpointing import Checkpointing
from deltawire_trainer.checkpoints import Checkpoints
from deltawire_trainer.journal import Dropped, Issued, Journal, RolledBack, Synced, Trained
from deltawire_trainer.learner import Learner
from deltawire_trainer.optimizer import build_optimizer
from deltawire_trainer.policy import Policy
from deltawire_trainer.resume import last_published, recover
from deltawire_trainer.service import train
from deltawire_trainer.settings import TrainerSettings

from .conftest import VOCABULARY, OpenStreams, tiny_llama
from .player import PROMPT, Player
from .rig import (
    RUN,
    blank_record,
    make_job,
    make_settings,
    make_trainer,
    playing,
    train_to_the_end,
)


class Script(Player):
    """Gives every ticket the same group whenever it is asked: what differs is the trainer."""

    def group(self, ticket: Ticket) -> RolloutGroup:
        rng = np.random.default_rng(ticket.task.seed)
        return RolloutGroup(
            group_id=ticket.ticket_id,
            run_id=self.run_id,
            task=ticket.task,
            rollouts=[self._scripted(ticket, rng, n) for n in range(ticket.group_size)],
        )

    def _scripted(self, ticket: Ticket, rng: np.random.Generator, number: int) -> Rollout:
        length = int(rng.integers(2, 6))
        ids = [*PROMPT, *rng.integers(0, VOCABULARY, length).tolist()]
        start, end = len(PROMPT), len(ids)
        version = PolicyVersion(ticket.min_version)
        return Rollout(
            rollout_id=f"{ticket.ticket_id}.{number}",
            sequences=[
                Sequence(
                    token_ids=ids,
                    loss_mask=[0] * start + [1] * length,
                    logprobs=[0.0] * start + rng.normal(-4, 0.5, length).tolist(),
                    spans=[VersionSpan(version=version, start=start, end=end)],
                )
            ],
            reward=float(rng.random()),
        )


def script(
    settings: TrainerSettings, streams: ProducerStreams, folder: Path, groups: int | None = None
) -> Script:
    return Script(open_store(settings.store), streams, run_id=RUN, folder=folder, groups=groups)


def masters(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = Checkpoints(run_dir / "checkpoints").newest()
    assert newest is not None
    moments = load_file(newest / "optimizer.safetensors")
    return {**load_file(newest / "model.safetensors"), **moments}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert np.array_equal(bits_of(tensor), bits_of(other[name])), name


async def straight(tmp_path: Path, base: Path, steps: int, **options: object) -> TrainerStatus:
    settings = make_settings(tmp_path)
    streams = MemoryStreams()
    async with playing(script(settings, streams, tmp_path / "replica")):
        return await train_to_the_end(settings, make_job(base, steps=steps, **options), streams)


async def killed_after(
    tmp_path: Path, base: Path, open_redis: OpenStreams, *, steps: int, **options: object
) -> None:
    """Run in the middle of a longer job, and vanish: no clean end, no last checkpoint, no acks.

    The player stops short of the next step's last group, so that however late the trainer is
    killed, it cannot have gone further.
    """
    settings, streams = make_settings(tmp_path), open_redis()
    job = make_job(base, steps=4, **options)
    groups = (steps + 1) * job.train.groups_per_step - 1
    async with playing(script(settings, open_redis(), tmp_path / "replica", groups)):
        killed = await train_to_the_end(settings, job, streams, vanish_after=steps)
    assert killed.step == steps


@pytest.mark.parametrize("checkpoint_every", [1, 2, 100])
async def test_training_four_steps_equals_two_and_two_more_in_every_bit(
    tmp_path: Path, base: Path, open_redis: OpenStreams, checkpoint_every: int
) -> None:
    whole = await straight(tmp_path / "a", base, 4)

    folder = tmp_path / "b"
    await killed_after(folder, base, open_redis, steps=2, checkpoint_every=checkpoint_every)
    settings = make_settings(folder)
    async with playing(script(settings, open_redis(), folder / "replica2")):
        job = make_job(base, steps=4, checkpoint_every=checkpoint_every)
        resumed = await train_to_the_end(settings, job, open_redis())

    assert resumed.state == "finished", resumed.reason
    assert resumed.version == whole.version == 4
    assert resumed.digest == whole.digest
    assert_same_bits(masters(folder / "run"), masters(tmp_path / "a" / "run"))
    assert [record.version for record in resumed.history] == [1, 2, 3, 4]
    assert resumed.groups.trained == whole.groups.trained == 8
    assert (resumed.groups.lost, resumed.groups.doubled, resumed.groups.open) == (0, 0, 0)


async def test_rollouts_that_a_crash_left_unwritten_are_written_when_the_step_is_made_again(
    tmp_path: Path, base: Path, open_redis: OpenStreams
) -> None:
    await killed_after(tmp_path, base, open_redis, steps=2, checkpoint_every=100)
    settings = make_settings(tmp_path)
    rollouts = settings.run_dir / "rollouts"
    before = (rollouts / "step_000002.jsonl").read_text()
    (rollouts / "step_000002.jsonl").unlink()

    async with playing(script(settings, open_redis(), tmp_path / "replica2")):
        job = make_job(base, steps=4, checkpoint_every=100)
        await train_to_the_end(settings, job, open_redis())

    assert (rollouts / "step_000002.jsonl").read_text() == before


async def test_when_groups_of_a_step_are_gone_the_published_head_is_adopted(
    tmp_path: Path, base: Path, open_redis: OpenStreams
) -> None:
    await killed_after(tmp_path, base, open_redis, steps=2, checkpoint_every=100)
    settings, fresh = make_settings(tmp_path), MemoryStreams()

    async with playing(script(settings, fresh, tmp_path / "replica2")):
        resumed = await train_to_the_end(settings, make_job(base, steps=4), fresh)

    assert resumed.state == "finished", resumed.reason
    assert resumed.step == 4
    assert resumed.groups.trained == 8
    assert resumed.groups.doubled == 0
    (replica,) = resumed.replicas
    assert replica.digest == resumed.digest


async def test_of_a_step_that_cannot_be_made_again_no_group_is_trained_on_twice(
    tmp_path: Path, base: Path, open_redis: OpenStreams
) -> None:
    await killed_after(tmp_path, base, open_redis, steps=2, checkpoint_every=100)
    settings, streams = make_settings(tmp_path), open_redis()
    gone, *left = await open_redis().read(limit=4, timeout_s=5.0)
    await streams.ack([gone.entry_id])
    job = make_job(base, steps=5, max_staleness=4, checkpoint_every=100)

    async with playing(script(settings, streams, tmp_path / "replica2")):
        resumed = await train_to_the_end(settings, job, streams)

    assert resumed.state == "finished", resumed.reason
    with Journal(settings.run_dir / "journal.jsonl") as journal:
        steps = [event for event in journal.events() if isinstance(event, Trained)]
    used = Counter(group_id for made in steps for group_id in made.groups)
    assert [made.record.step for made in steps] == [1, 2, 3, 4, 5]
    assert set(used.values()) == {1}
    assert {group.group.group_id for group in left} <= set(used)
    assert resumed.groups.doubled == 0
    assert (await streams.depth()).groups_pending == 0


def checkpointing_of(intake: "_Taken", tmp_path: Path) -> Checkpointing:
    policy = Policy(tiny_llama())
    return Checkpointing(
        Checkpoints(tmp_path / "checkpoints"),
        Learner(policy, build_optimizer(policy, TrainSpec()), TrainSpec(), max_tokens=8),
        intake,  # type: ignore[arg-type]
        run_id=RUN,
        every=1,
    )


async def test_a_checkpoint_acks_only_what_it_contains(tmp_path: Path) -> None:
    """The groups of the next step may be taken before the writing begins."""
    intake = _Taken(["e-1"])
    checkpointing = checkpointing_of(intake, tmp_path)
    checkpointing.start_if_due(step=1, version=1)
    intake.taken.append("e-2")
    await checkpointing.settled()
    assert intake.acked == ["e-1"]


async def test_what_the_last_checkpoint_could_not_ack_is_acked_at_the_end(tmp_path: Path) -> None:
    intake = _Taken(["e-1"])
    checkpointing = checkpointing_of(intake, tmp_path)
    intake.away = True
    checkpointing.start_if_due(step=1, version=1)
    await checkpointing.settled()
    assert intake.acked == []

    intake.away = False
    await checkpointing.write(step=1, version=1)

    assert intake.acked == ["e-1"]


class _Taken:
    """An intake whose groups are taken one after the other."""

    def __init__(self, taken: list[str]) -> None:
        self.taken, self.acked = taken, list[str]()
        self.away = False

    def trained_entries(self) -> list[str]:
        return list(self.taken)

    async def ack_trained(self, entry_ids: list[str]) -> None:
        if self.away:
            raise StreamUnavailable("away")
        self.acked += entry_ids


async def test_a_trainer_that_lost_its_disk_takes_the_run_over(
    tmp_path: Path, base: Path, open_redis: OpenStreams
) -> None:
    await killed_after(tmp_path, base, open_redis, steps=2, checkpoint_every=100)
    shutil.rmtree(tmp_path / "run")
    job = make_job(base, steps=4)

    refused = await train_to_the_end(make_settings(tmp_path), job, open_redis())
    assert refused.state == "failed"
    assert refused.reason.startswith("Fenced")

    shutil.rmtree(tmp_path / "run")
    settings = make_settings(tmp_path, take_over=True)
    async with playing(script(settings, open_redis(), tmp_path / "replica2")):
        resumed = await train_to_the_end(settings, job, open_redis())

    assert resumed.state == "finished", resumed.reason
    assert (resumed.step, resumed.version) == (4, 4)
    assert resumed.groups.dropped.get("uncertain", 0) >= 4, "delivered before, perhaps trained on"
    assert resumed.groups.doubled == 0
    (replica,) = [replica for replica in resumed.replicas if replica.version == 4]
    assert replica.digest == resumed.digest


def test_a_checkpoint_restores_masters_moments_and_rng(tmp_path: Path) -> None:
    spec = make_job(tmp_path).train
    policy = Policy(tiny_llama(), working_dtype=torch.bfloat16)
    optimizer = build_optimizer(policy, spec)
    for master in policy.masters.values():
        master.grad = torch.randn_like(master)
    optimizer.step()
    policy.refresh()
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write(run_id=RUN, step=3, version=2, policy=policy, optimizer=optimizer)
    expected_draw = torch.rand(3)

    other = Policy(tiny_llama(seed=9), working_dtype=torch.bfloat16)
    other_optimizer = build_optimizer(other, spec)
    state = checkpoints.restore(path, policy=other, optimizer=other_optimizer)

    assert (state.step, state.version) == (3, 2)
    assert torch.equal(torch.rand(3), expected_draw)
    for name, master in policy.masters.items():
        assert torch.equal(master, other.masters[name])
        assert torch.equal(policy.working[name], other.working[name])
        held, restored = optimizer.state[master], other_optimizer.state[other.masters[name]]
        assert all(torch.equal(held[key], restored[key]) for key in held)


def test_a_half_written_checkpoint_is_never_met(tmp_path: Path) -> None:
    policy = Policy(tiny_llama())
    optimizer = build_optimizer(policy, make_job(tmp_path).train)
    checkpoints = Checkpoints(tmp_path)
    whole = checkpoints.write(run_id=RUN, step=1, version=1, policy=policy, optimizer=optimizer)
    (tmp_path / ".step_000002.tmp").mkdir()
    (tmp_path / ".step_000002.tmp" / "state.json").write_text("{")

    assert checkpoints.newest() == whole


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    policy = Policy(tiny_llama())

    with pytest.raises(StoreError, match="checkpoint of step 1 could not be written"):
        Checkpoints(blocked).write(
            run_id=RUN,
            step=1,
            version=1,
            policy=policy,
            optimizer=build_optimizer(policy, make_job(tmp_path).train),
        )


def test_a_disk_that_fills_up_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    policy = Policy(tiny_llama())
    optimizer = build_optimizer(policy, make_job(tmp_path).train)
    monkeypatch.setattr("deltawire_trainer.checkpoints.save_file", full)

    with pytest.raises(StoreError, match=r"checkpoint of step 1 .*No space left"):
        Checkpoints(tmp_path).write(
            run_id=RUN, step=1, version=1, policy=policy, optimizer=optimizer
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_checkpoint_that_was_cut_short_is_named(tmp_path: Path, file: str) -> None:
    policy = Policy(tiny_llama())
    optimizer = build_optimizer(policy, make_job(tmp_path).train)
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.write(run_id=RUN, step=1, version=1, policy=policy, optimizer=optimizer)
    (path / file).write_bytes((path / file).read_bytes()[:-1])

    with pytest.raises(StoreError, match="step_000001 cannot be read"):
        checkpoints.restore(path, policy=policy, optimizer=optimizer)


def _checkpoints_of(folder: Path, *, steps: tuple[int, ...]) -> Checkpoints:
    policy = Policy(tiny_llama())
    optimizer = build_optimizer(policy, make_job(folder).train)
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.write(run_id=RUN, step=step, version=step, policy=policy, optimizer=optimizer)
    return checkpoints


def test_old_checkpoints_make_room(tmp_path: Path) -> None:
    _checkpoints_of(tmp_path, steps=(1, 2, 3))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    """Names are longer from a million steps on."""
    checkpoints = _checkpoints_of(tmp_path, steps=(999_998, 999_999, 1_000_000))

    assert checkpoints.newest() == tmp_path / "step_1000000"
    assert {path.name for path in tmp_path.iterdir()} == {"step_999999", "step_1000000"}


async def test_a_stop_that_was_acknowledged_holds_for_the_process_that_goes_on(
    tmp_path: Path, base: Path
) -> None:
    settings, streams, job = make_settings(tmp_path), MemoryStreams(), make_job(base, steps=4)
    killed = make_trainer(settings, job)
    store = open_store(settings.store)
    running = asyncio.create_task(train(killed, settings, store, streams, Metrics("trainer")))
    while killed.state != "waiting":
        assert not running.done()
        await asyncio.sleep(0.01)
    killed.running().stop("stopped on request")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running

    async with playing(script(settings, streams, tmp_path / "replica")):
        resumed = await train_to_the_end(settings, job, streams)

    assert (resumed.state, resumed.reason) == ("finished", "stopped on request")
    assert (resumed.step, resumed.groups.open, resumed.groups.lost) == (0, 0, 0)


async def test_a_run_that_is_over_takes_a_stop_and_changes_nothing(
    tmp_path: Path, base: Path
) -> None:
    settings, streams, job = make_settings(tmp_path), MemoryStreams(), make_job(base, steps=1)
    trainer = make_trainer(settings, job)
    store = open_store(settings.store)
    async with playing(script(settings, streams, tmp_path / "replica")):
        assert await train(trainer, settings, store, streams, Metrics("trainer")) == 0

    trainer.running().stop("too late")

    assert ((await trainer.status()).state, (await trainer.status()).reason) == ("finished", "")


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_journal_line_cut_short_by_a_crash_is_taken_away(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(Issued(ids=["a"]))
        journal.append(Issued(ids=["b"]))
    path.write_bytes(path.read_bytes()[:-cut])

    with Journal(path) as journal:
        journal.append(Dropped(group_id="a", reason="stale"))
        kinds = [event.kind for event in journal.events()]

    assert kinds == ["issued", "dropped"]


_EVALUATED_OF_OLD = b'{"kind":"evaluated","version":2,"reward":0.5,"episodes":4,"expected":4}\n'


@pytest.mark.parametrize("followed", [True, False])
def test_a_journal_of_another_version_is_told_by_its_line_and_kept(
    tmp_path: Path, followed: bool
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(Issued(ids=["a"]))
    written = path.read_bytes() + _EVALUATED_OF_OLD
    if followed:
        written += b'{"kind":"issued","ids":["b"]}\n'
    path.write_bytes(written)

    with (
        Journal(path) as journal,
        pytest.raises(MalformedMessage, match=r"journal\.jsonl, line 2: .*evaluated\.record"),
    ):
        recover(journal.events(), checkpoint_step=0)
    assert path.read_bytes() == written


async def test_a_run_whose_journal_cannot_be_read_says_so_and_is_not_started_again(
    tmp_path: Path, base: Path
) -> None:
    settings = make_settings(tmp_path)
    settings.run_dir.mkdir()
    (settings.run_dir / "journal.jsonl").write_bytes(_EVALUATED_OF_OLD)
    trainer, store = make_trainer(settings, make_job(base)), open_store(settings.store)

    async with asyncio.timeout(120):
        code = await train(trainer, settings, store, MemoryStreams(), Metrics("trainer"))

    assert code == 2
    assert trainer.failure.startswith("MalformedMessage: ")
    assert "TRAINER_TAKE_OVER" in trainer.failure


def trained(step: int) -> Trained:
    return Trained(record=blank_record(step), live_version=step, groups={f"g{step}": [0]})


def test_steps_whose_version_came_late_count_as_published_with_it() -> None:
    """The sync of step 2 failed, so step 3 was published as the version meant for step 2."""
    late = SyncRecord.model_validate(
        dict.fromkeys(SyncRecord.model_fields, 0)
        | {"version": 2, "kind": "delta"}
        | {"encoding": "seed", "key": "", "encoding_reason": ""}
    )

    state = recover(
        [trained(1), trained(2), trained(3), Synced(step=3, record=late)], checkpoint_step=0
    )

    assert [record.version for record in state.history(3)] == [1, 2, 2]
    assert last_published(state.steps.values(), version=2) == 3


def test_steps_after_the_checkpoint_are_open_again_and_in_order() -> None:
    events = [
        Issued(ids=["g1", "g2", "g3", "g4"]),
        trained(1),
        trained(2),
        trained(3),
        RolledBack(step=2),
        trained(3),
    ]

    state = recover(events, checkpoint_step=1)

    assert [made.record.step for made in state.after(1)] == [2, 3]
    assert state.ledger.fate("g1") == "trained"
    assert state.ledger.open_ids() == ["g2", "g3", "g4"]
    assert state.tickets == 4
