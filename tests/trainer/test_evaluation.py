"""Evaluation beside training, learning, and syncs that fail: the loop's remaining promises."""

import asyncio
from pathlib import Path

import pytest

from deltawire.job.spec import EvalSpec
from deltawire.protocol.control import EvalRecord
from deltawire.protocol.rollouts import RolloutGroup, Task, Ticket
from deltawire.protocol.versions import PolicyVersion
from deltawire.service.metrics import Metrics
from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams
from deltawire_trainer.evaluation import Evaluation
from deltawire_trainer.service import train

from .player import Player
from .rig import RUN, make_job, make_settings, make_trainer, playing, train_to_the_end
from .test_intake import rollout


def ticket(name: str) -> Ticket:
    return Ticket(ticket_id=name, task=Task(), group_size=1, purpose="eval")


def home(name: str, *, version: int, reward: float) -> RolloutGroup:
    return RolloutGroup(
        group_id=name,
        task=Task(),
        purpose="eval",
        rollouts=[rollout(name, version=version, reward=reward)],
    )


async def test_a_round_counts_only_episodes_of_its_version_and_each_once() -> None:
    evaluation = Evaluation(hold_s=30.0)
    evaluation.open(4, [ticket("a"), ticket("b"), ticket("c")], step=8)

    evaluation.receive(home("a", version=4, reward=1.0))
    evaluation.receive(home("a", version=4, reward=1.0))
    evaluation.receive(home("b", version=5, reward=9.0))
    evaluation.receive(home("stranger", version=4, reward=9.0))
    evaluation.receive(home("c", version=4, reward=0.0))
    await asyncio.wait_for(evaluation.hold(), 5.0)
    result = evaluation.close()

    assert result is not None
    assert (result.version, result.step, result.reward) == (4, 8, 0.5)
    assert (result.episodes, result.finished, result.expected) == (2, 3, 3)
    assert evaluation.results == [result]
    assert evaluation.close() is None


async def test_a_round_that_does_not_come_home_holds_nothing_up_for_ever() -> None:
    evaluation = Evaluation(hold_s=60.0)
    evaluation.open(1, [ticket("a"), ticket("b")], step=1)
    evaluation.receive(home("a", version=1, reward=0.5))
    assert evaluation.waits_for == "evaluation of version 1"

    await asyncio.wait_for(evaluation.hold(limit_s=0.05), 5.0)

    result = evaluation.close()
    assert result is not None
    assert (result.finished, result.expected, result.reward) == (1, 2, 0.5)
    assert evaluation.waits_for == ""


def test_a_round_without_one_good_episode_has_no_reward_and_says_why() -> None:
    evaluation = Evaluation(hold_s=60.0)
    evaluation.open(1, [ticket("a")], step=1)
    failed = rollout("a", version=1, reward=0.0)
    failed = failed.model_copy(update={"status": "error", "reason": "picky: ValueError: no"})
    evaluation.receive(home("a", version=1, reward=0.0).model_copy(update={"rollouts": [failed]}))

    result = evaluation.close()

    assert result is not None
    assert (result.reward, result.episodes, result.finished) == (None, 0, 1)
    assert result.error_reason == "picky: ValueError: no"


def test_what_an_earlier_process_evaluated_stays_known_and_is_replaced_by_version() -> None:
    past = EvalRecord(
        version=PolicyVersion(2), step=2, reward=0.1, episodes=1, finished=1, expected=1
    )
    evaluation = Evaluation(hold_s=60.0, past=[past])
    evaluation.open(2, [ticket("a")], step=2)
    evaluation.receive(home("a", version=2, reward=0.7))
    evaluation.close()
    assert [(record.version, record.reward) for record in evaluation.results] == [(2, 0.7)]


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_reward_rises_and_evaluations_are_pinned(
    tmp_path: Path, base: Path, max_staleness: int
) -> None:
    """Asynchronous and strictly on-policy runs both learn to say the wanted token."""
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    job = make_job(base, steps=15, lr=5e-3, group_size=8, max_staleness=max_staleness, guard=True)
    job = job.model_copy(update={"eval": EvalSpec(every=5, episodes=4, temperature=1.0)})
    player = Player(open_store(settings.store), streams, run_id=RUN, folder=tmp_path / "replica")

    async with playing(player):
        status = await train_to_the_end(settings, job, streams)

    assert status.state == "finished", status.reason
    rewards = [record.reward for record in status.history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert max(record.staleness_max for record in status.history) <= max_staleness
    assert all(record.mismatch_kl < 1e-3 for record in status.history)
    assert status.groups.dropped == {}, "tickets are born fresh: nothing goes stale"
    events = (settings.run_dir / "journal.jsonl").read_text().splitlines()
    evaluated = [line for line in events if line.startswith('{"kind":"evaluated"')]
    assert len(evaluated) == len(status.evals)
    assert [record.version for record in status.evals] == [0, 5, 10, 15]
    last = status.evals[-1]
    assert (last.step, last.episodes, last.expected) == (15, 4, 4), "the last one is waited for"
    assert status.groups.issued == status.groups.trained == 30


async def test_the_run_ends_only_when_its_last_version_is_evaluated(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    job = make_job(base, steps=1, groups_per_step=1, group_size=2)
    job = job.model_copy(update={"eval": EvalSpec(every=1, episodes=2, temperature=1.0)})
    player = Player(open_store(settings.store), streams, run_id=RUN, folder=tmp_path / "replica")

    async with playing(player):
        status = await train_to_the_end(settings, job, streams)

    assert status.state == "finished", status.reason
    assert [(e.version, e.step, e.episodes) for e in status.evals] == [(0, 0, 2), (1, 1, 2)]
    assert status.history[0].groups_with_signal is not None
    assert (status.rollouts_per_step, status.errors_total) == (2, 0)


async def test_a_last_evaluation_that_nobody_plays_is_told_of_and_holds_nothing_up_for_ever(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path, last_eval_s=0.1)
    job = make_job(base, steps=1, groups_per_step=1, group_size=2)
    job = job.model_copy(update={"eval": EvalSpec(every=2, episodes=1, temperature=1.0)})
    trainer = make_trainer(settings, job)
    training = asyncio.create_task(
        train(trainer, settings, open_store(settings.store), streams, Metrics("trainer"))
    )
    while not training.done():
        await asyncio.sleep(0.01)
        if trainer.state == "waiting":
            trainer.running().stop("enough")

    assert training.result() == 0
    (unfinished,) = (await trainer.status()).evals
    assert (unfinished.version, unfinished.finished, unfinished.expected) == (0, 0, 1)
