"""Intake: whatever arrives, in whatever order and how often, every group ends exactly once."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.job.spec import JobSpec, TrainSpec
from deltawire.protocol.errors import StreamUnavailable
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence, Task
from deltawire.protocol.versions import PolicyVersion, VersionSpan
from deltawire.streams.base import DeliveredGroup
from deltawire_trainer.intake import Intake, Rules, is_sound, judge
from deltawire_trainer.journal import Dropped, Journal
from deltawire_trainer.ledger import Ledger

VOCABULARY = 10
RULES = Rules(vocabulary=VOCABULARY, group_size=3, min_group=2, needs_spread=False)


def rollout(name: str, *, version: int = 0, reward: float = 0.0, **options: object) -> Rollout:
    fields: dict[str, object] = {
        "rollout_id": name,
        "sequences": [
            Sequence(
                token_ids=[1, 2, 3],
                loss_mask=[0, 1, 1],
                logprobs=[0.0, -1.0, -1.0],
                spans=[VersionSpan(version=PolicyVersion(version), start=1, end=3)],
            )
        ],
        "reward": reward,
        **options,
    }
    return Rollout.model_validate(fields)


def sequence_with(**fields: object) -> Sequence:
    """The sequence of `rollout`, with something more said of it."""
    return rollout("x").sequences[0].model_copy(update=fields)


def group(group_id: str, *rollouts: Rollout, **options: object) -> RolloutGroup:
    made = list(rollouts) or [rollout(f"{group_id}.{n}", reward=float(n)) for n in range(3)]
    fields: dict[str, object] = {
        "group_id": group_id,
        "run_id": "r",
        "task": Task(),
        "rollouts": made,
        **options,
    }
    return RolloutGroup.model_validate(fields)


class Recorder:
    """A stream that hands out what it is given and writes down what is acked."""

    def __init__(self) -> None:
        self.queue: list[DeliveredGroup] = []
        self.acked: list[str] = []
        self.dead: list[tuple[str, str]] = []
        self.fails: list[BaseException] = []
        """What the next calls raise that tell the streams something."""

    def deliver(self, entry_id: str, what: RolloutGroup, *, redelivered: bool = False) -> None:
        self.queue.append(DeliveredGroup(entry_id=entry_id, group=what, redelivered=redelivered))

    async def read(self, *, limit: int, timeout_s: float) -> list[DeliveredGroup]:
        taken, self.queue = self.queue[:limit], self.queue[limit:]
        return taken

    async def ack(self, entry_ids: list[str]) -> None:
        if self.fails:
            raise self.fails.pop()
        self.acked += entry_ids

    async def dead_letter(self, delivered: DeliveredGroup, *, reason: str) -> None:
        if self.fails:
            raise self.fails.pop()
        self.dead.append((delivered.entry_id, reason))


class Rig:
    """An intake with everything it talks to."""

    def __init__(self, folder: Path, *, rules: Rules = RULES, trusts: bool = True) -> None:
        self.streams, self.ledger = Recorder(), Ledger()
        self.journal = Journal(folder / "journal.jsonl")
        self.intake = Intake(
            self.streams,  # type: ignore[arg-type]
            self.ledger,
            self.journal,
            rules,
            run_id="r",
            trusts_redelivered=trusts,
        )

    async def read_all(self) -> None:
        while await self.intake.read(timeout_s=0.0):
            pass


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: bool) -> Rig:
        made.append(Rig(tmp_path, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.journal.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


def take(rig: Rig, count: int, *, live: int = 0, bound: int = 1) -> list[str]:
    groups = rig.intake.batch(count, live_version=live, max_staleness=bound)
    rig.ledger.train([g.group.group_id for g in groups], step=1)
    return [g.group.group_id for g in groups]


async def test_errors_of_dropped_groups_are_kept_for_the_record_of_the_next_step(rig: Rig) -> None:
    failed = [
        rollout(f"a.{n}", status="error", reason=f"picky: ValueError: no {n} (j.py:3)")
        for n in range(2)
    ]
    late = rollout("a.2", status="error", reason="deadline: the ticket's time was over")
    rig.streams.deliver("1", group("a", *failed, late))
    await rig.read_all()
    assert rig.intake.rollouts_held == 3
    assert take(rig, 1) == []

    assert (rig.intake.rollouts_held, rig.intake.errors.total) == (0, 3)
    taken = rig.intake.take_errors()
    assert (taken.total, taken.reason) == (3, "picky: ValueError: no 0 (j.py:3)")
    assert rig.intake.errors.total == 0


# -- judging --------------------------------------------------------------------------------------


def test_stale_samples_are_left_out_by_their_oldest_token() -> None:
    mixed = Sequence(
        token_ids=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -1.0, -1.0],
        spans=[
            VersionSpan(version=PolicyVersion(2), start=1, end=2),
            VersionSpan(version=PolicyVersion(5), start=2, end=3),
        ],
    )
    judged = group(
        "g", rollout("a", version=4), rollout("b", sequences=[mixed]), rollout("c", version=5)
    )

    assert judge(judged, RULES, live_version=5, max_staleness=3).keep == (0, 1, 2)
    assert judge(judged, RULES, live_version=5, max_staleness=2).keep == (0, 2)
    assert judge(judged, RULES, live_version=7, max_staleness=2).reason == "stale"


def test_a_group_in_which_no_chosen_agent_spoke_is_dropped() -> None:
    chosen = replace(RULES, agents=("solver",))
    spoke = rollout("a").sequences[0].model_copy(update={"agent": "solver"})
    silent, heard = group("g"), group("h", *(rollout(n, sequences=[spoke]) for n in "ab"))
    assert judge(silent, chosen, live_version=0, max_staleness=0).reason == "no_agent"
    assert judge(heard, chosen, live_version=0, max_staleness=0).keep == (0, 1)


def test_whether_rewards_differ_is_asked_of_the_chosen_agents() -> None:
    rules = replace(RULES, needs_spread=True, agents=("proposer",))
    plain = rollout("a").sequences[0]

    def duel(name: str, *, proposer: float) -> Rollout:
        paid = {"solver": 0.0, "proposer": proposer}
        sequences = [
            plain.model_copy(update={"agent": agent, "reward": reward})
            for agent, reward in paid.items()
        ]
        return rollout(name, sequences=sequences)

    differ = group("g", duel("a", proposer=0.2), duel("b", proposer=0.0))
    alike = group("h", duel("a", proposer=0.2), duel("b", proposer=0.2))
    assert judge(differ, rules, live_version=0, max_staleness=0).keep == (0, 1)
    assert judge(alike, rules, live_version=0, max_staleness=0).reason == "no_signal"


@pytest.mark.parametrize(
    "broken",
    [
        rollout("x", status="error", reason="environment gone"),
        rollout("x", reward=float("nan")),
        rollout("x", sequences=[]),
        rollout(
            "x",
            sequences=[Sequence(token_ids=[1, 99], loss_mask=[0, 1], logprobs=[0, -1], spans=[])],
        ),
        rollout(
            "x",
            sequences=[
                Sequence(token_ids=[1, 2], loss_mask=[0, 1], logprobs=[0, float("inf")], spans=[])
            ],
        ),
        rollout("x", sequences=[Sequence(token_ids=[1], loss_mask=[1], logprobs=[-1.0], spans=[])]),
        rollout("x", sequences=[sequence_with(token_rewards=[1.0])]),
        rollout("x", sequences=[sequence_with(sampling_mask=[[2, 99], [3]])]),
        rollout("x", sequences=[sequence_with(sampling_mask=[[2], []])]),
    ],
)
def test_a_broken_rollout_is_left_out_and_its_group_goes_on(broken: Rollout) -> None:
    assert not is_sound(broken, vocabulary=VOCABULARY)

    judged = group("g", rollout("a"), broken, rollout("b"))
    assert judge(judged, RULES, live_version=0, max_staleness=0).keep == (0, 2)

    judged = group("g", rollout("a"), broken, broken)
    assert judge(judged, RULES, live_version=0, max_staleness=0).reason == "unusable"


def test_dynamic_sampling_replaces_groups_without_a_signal() -> None:
    rules = Rules.of(
        JobSpec(name="j", train=TrainSpec(algorithm="dapo", group_size=2)), vocabulary=VOCABULARY
    )

    silent = group("g", rollout("a", reward=1.0), rollout("b", reward=1.0))

    assert judge(silent, rules, live_version=0, max_staleness=0).reason == "no_signal"
    assert judge(silent, RULES, live_version=0, max_staleness=0).keep == (0, 1)


# -- one fate for every group ---------------------------------------------------------------------


async def test_groups_are_taken_in_order_of_arrival_and_acked_by_a_checkpoint(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.streams.deliver(f"e-{name}", group(name))
    await rig.read_all()

    assert take(rig, 2) == ["a", "b"]
    assert rig.streams.acked == []

    contained = rig.intake.trained_entries()
    await rig.intake.ack_trained(contained)
    assert rig.streams.acked == ["e-a", "e-b"]
    assert rig.intake.trained_entries() == []


async def test_the_tokens_of_a_group_are_looked_at_once_however_long_it_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at all that is held, whenever something arrives, would hold the event loop up."""
    looked_at: list[str] = []

    def counted(one: Rollout, *, vocabulary: int) -> bool:
        looked_at.append(one.rollout_id)
        return is_sound(one, vocabulary=vocabulary)

    monkeypatch.setattr("deltawire_trainer.intake.is_sound", counted)
    for name in ("a", "b"):
        rig.streams.deliver(f"e-{name}", group(name))
        await rig.read_all()
        assert take(rig, 3) == []

    assert take(rig, 2) == ["a", "b"]
    assert sorted(looked_at) == ["a.0", "a.1", "a.2", "b.0", "b.1", "b.2"]


async def test_too_few_groups_are_kept_for_later(rig: Rig) -> None:
    rig.streams.deliver("e-a", group("a"))
    await rig.read_all()

    assert take(rig, 2) == []
    assert rig.intake.held == 1


async def test_groups_taken_after_a_checkpoint_began_are_not_acked_by_it(rig: Rig) -> None:
    rig.streams.deliver("e-a", group("a"))
    rig.streams.deliver("e-b", group("b"))
    await rig.read_all()
    take(rig, 1)
    contained = rig.intake.trained_entries()
    take(rig, 1)

    await rig.intake.ack_trained(contained)

    assert rig.streams.acked == ["e-a"]


async def test_a_second_delivery_of_a_trained_group_is_not_acked_before_its_checkpoint(
    rig: Rig,
) -> None:
    rig.streams.deliver("e-a", group("a"))
    await rig.read_all()
    take(rig, 1)

    rig.streams.deliver("e-a", group("a"), redelivered=True)
    await rig.read_all()

    assert rig.streams.acked == []
    assert take(rig, 1) == []
    assert rig.intake.duplicates == 1


async def test_what_a_checkpoint_contained_is_acked_after_a_restart(rig: Rig) -> None:
    rig.ledger.issue(["a"])
    rig.ledger.train(["a"], step=3)

    rig.streams.deliver("e-a", group("a"), redelivered=True)
    await rig.read_all()

    assert rig.streams.acked == ["e-a"]
    assert rig.ledger.counts().doubled == 0


async def test_a_drop_is_in_the_journal_before_it_is_acked(rig: Rig) -> None:
    rig.streams.deliver("e-a", group("a"))
    await rig.read_all()

    assert take(rig, 1, live=9) == []

    (event,) = rig.journal.events()
    assert isinstance(event, Dropped)
    assert (event.group_id, event.reason) == ("a", "stale")
    assert rig.ledger.counts().dropped == {"stale": 1}
    await rig.read_all()
    assert rig.streams.acked == ["e-a"]


async def test_a_group_is_dropped_while_the_streams_are_away_and_acked_when_they_answer(
    rig: Rig,
) -> None:
    rig.streams.deliver("e-a", group("a"))
    await rig.read_all()
    rig.streams.fails = [StreamUnavailable("away")]

    assert take(rig, 1, live=9) == []
    with pytest.raises(StreamUnavailable):
        await rig.read_all()
    await rig.read_all()

    assert rig.streams.acked == ["e-a"]
    assert rig.ledger.counts().dropped == {"stale": 1}


@pytest.mark.parametrize("cut", [StreamUnavailable("away"), asyncio.CancelledError()])
async def test_what_came_with_a_group_that_could_not_be_acked_is_not_lost(
    rig: Rig, cut: BaseException
) -> None:
    """Streams give an entry to a process once: what was delivered must not be forgotten here."""
    rig.streams.deliver("e-x", group("x", purpose="eval"))
    rig.streams.deliver("e-a", group("a"))
    rig.streams.deliver("e-b", group("b"))
    rig.streams.fails = [cut]

    with pytest.raises(type(cut)):
        await rig.read_all()
    await rig.read_all()

    assert take(rig, 2) == ["a", "b"]
    assert rig.streams.acked == ["e-x"]
    assert rig.intake.duplicates == 0


@pytest.mark.parametrize("cut", [StreamUnavailable("away"), asyncio.CancelledError()])
async def test_what_came_with_a_group_that_could_not_be_set_aside_is_not_lost(
    rig: Rig, cut: BaseException
) -> None:
    rig.streams.deliver("e-x", group("x", run_id="other"))
    rig.streams.deliver("e-a", group("a"))
    rig.streams.fails = [cut]

    with pytest.raises(type(cut)):
        await rig.read_all()
    await rig.read_all()

    assert take(rig, 1) == ["a"]
    assert rig.streams.dead == [("e-x", "of run 'other'")]


async def test_without_a_journal_what_was_delivered_before_is_never_trained_on(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(trusts=False)
    rig.streams.deliver("e-a", group("a"), redelivered=True)
    rig.streams.deliver("e-b", group("b"))
    await rig.read_all()

    assert take(rig, 1) == ["b"]
    assert rig.ledger.counts().dropped == {"uncertain": 1}


async def test_evaluation_groups_are_never_trained_on(rig: Rig) -> None:
    seen: list[str] = []
    rig.intake.on_eval = lambda arrived: seen.append(arrived.group_id)
    rig.streams.deliver("e-x", group("x", purpose="eval"))
    await rig.read_all()

    assert seen == ["x"]
    assert rig.intake.held == 0
    assert rig.streams.acked == ["e-x"]
    assert rig.ledger.counts().issued == 0


async def test_groups_of_another_run_are_set_aside(rig: Rig) -> None:
    rig.streams.deliver("e-x", group("x", run_id="other"))
    await rig.read_all()

    assert rig.streams.dead == [("e-x", "of run 'other'")]
    assert rig.intake.held == 0


async def test_a_recorded_step_is_made_of_exactly_its_groups(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.streams.deliver(f"e-{name}", group(name), redelivered=True)
    await rig.read_all()

    assert rig.intake.recorded({"c": [0], "gone": [0, 1]}) == []
    made = rig.intake.recorded({"c": [0, 2], "a": [1]})

    assert [(g.group.group_id, g.keep) for g in made] == [("c", (0, 2)), ("a", (1,))]
    assert [r.rollout_id for r in made[0].rollouts] == ["c.0", "c.2"]


deliveries = st.lists(
    st.tuples(
        st.integers(0, 7),  # which group
        st.integers(0, 3),  # by which entry
        st.integers(0, 6),  # sampled from which version
        st.sampled_from(["ok", "error", "few"]),
        st.booleans(),  # redelivered
    ),
    max_size=30,
)
acts = st.lists(st.sampled_from(["read", "take", "checkpoint"]), max_size=20)


@given(deliveries, acts)
@settings(max_examples=60, deadline=None)
def test_every_group_ends_exactly_once(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[int, int, int, str, bool]],
    order: list[str],
) -> None:
    asyncio.run(_play(Rig(tmp_path_factory.mktemp("intake")), drawn, order))


async def _play(rig: Rig, drawn: list[tuple[int, int, int, str, bool]], order: list[str]) -> None:
    rig.ledger.issue(f"g{n}" for n in range(8))
    for number, entry, version, kind, again in drawn:
        members = [
            rollout(f"g{number}.{i}", version=version, status="error" if kind == "error" else "ok")
            for i in range(1 if kind == "few" else 3)
        ]
        entry_id = f"e{number}.{entry}"
        rig.streams.deliver(entry_id, group(f"g{number}", *members), redelivered=again)
    trained: list[str] = []
    contained: list[str] = []
    for live, act in enumerate([*order, "read", "take", "take", "checkpoint"]):
        match act:
            case "read":
                await rig.read_all()
            case "take":
                trained += take(rig, 1, live=live // 3, bound=2)
            case "checkpoint":
                contained = rig.intake.trained_entries()
                await rig.intake.ack_trained(contained)
    await rig.read_all()
    await rig.intake.drop_all("end_of_run")

    counts = rig.ledger.counts()
    assert len(trained) == len(set(trained)), "trained on twice"
    assert counts.trained == len(trained)
    assert counts.doubled == 0
    assert counts.issued == counts.trained + counts.open + sum(counts.dropped.values())
    delivered = {f"g{number}" for number, *_ in drawn}
    settled = {g for g in (f"g{n}" for n in range(8)) if rig.ledger.fate(g) != "open"}
    assert settled == delivered
    rig.journal.close()
