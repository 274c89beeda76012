"""Evaluation beside training, learning, and syncs that fail: the loop's remaining promises."""

import asyncio
from pathlib import Path

import pytest

from deltawire.job.spec import EvalSpec
from deltawire.protocol.rollouts import RolloutGroup, Task, Ticket
from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams
from deltawire_trainer.evaluation import Evaluation

from .player import Player
from .rig import RUN, make_job, make_settings, playing, train_to_the_end
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
    evaluation.open(4, [ticket("a"), ticket("b"), ticket("c")])

    evaluation.receive(home("a", version=4, reward=1.0))
    evaluation.receive(home("a", version=4, reward=1.0))
    evaluation.receive(home("b", version=5, reward=9.0))
    evaluation.receive(home("stranger", version=4, reward=9.0))
    evaluation.receive(home("c", version=4, reward=0.0))
    await asyncio.wait_for(evaluation.hold(), 5.0)
    result = evaluation.close()

    assert result is not None
    assert (result.version, result.reward) == (4, 0.5)
    assert (result.episodes, result.expected) == (2, 3)
    assert evaluation.close() is None


async def test_a_round_that_does_not_come_home_holds_nothing_up_for_ever() -> None:
    evaluation = Evaluation(hold_s=0.05)
    evaluation.open(1, [ticket("a")])

    await asyncio.wait_for(evaluation.hold(), 5.0)

    assert evaluation.close() is None


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
    assert len(evaluated) >= 3
    assert status.groups.issued == status.groups.trained == 30
