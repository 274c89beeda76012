"""Advantages, corrections, staleness, guard, tickets, schedule: small pure functions, by table."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltawire.job.spec import EvalSpec, JobSpec, TrainSpec
from deltawire.protocol.rollouts import Rollout, Sequence
from deltawire.protocol.versions import PolicyVersion, VersionSpan
from deltawire_trainer.account import groups_with_signal
from deltawire_trainer.advantages import advantages_of, batch_normalised, leave_one_out
from deltawire_trainer.correction import OPSM_KL, RULES, correct
from deltawire_trainer.guard import PATIENCE, Guard, Signals
from deltawire_trainer.optimizer import learning_rate
from deltawire_trainer.samples import Weighing, batch_samples, sample_of
from deltawire_trainer.staleness import effective_sample_size, mismatch_kl, version_spread
from deltawire_trainer.tickets import TicketBook, oldest_start, room

from .conftest import MakeSample
from .test_intake import rollout as intake_rollout

# -- advantages -----------------------------------------------------------------------------------

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=8).map(np.array)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
@given(rewards)
def test_advantages_of_a_group_sum_to_nothing(algorithm: str, group: np.ndarray) -> None:
    (advantages,) = advantages_of([group], algorithm=algorithm, group_size=8)

    assert advantages.sum() == pytest.approx(0.0, abs=1e-6)


def test_grpo_divides_by_the_deviation_and_dr_grpo_does_not() -> None:
    group = np.array([0.0, 0.0, 1.0, 1.0])

    (grpo,) = advantages_of([group], algorithm="grpo", group_size=4)
    (dr_grpo,) = advantages_of([group], algorithm="dr_grpo", group_size=4)

    assert grpo == pytest.approx(np.array([-0.5, -0.5, 0.5, 0.5]) / (math.sqrt(1 / 3) + 1e-4))
    assert dr_grpo.tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert leave_one_out(np.array([3.0, 1.0, 2.0])).tolist() == [1.5, -1.5, 0.0]


def test_reinforce_pp_has_one_baseline_for_the_whole_batch() -> None:
    low, high = batch_normalised([np.array([0.0, 0.0]), np.array([1.0, 1.0])])

    assert (low < 0).all()
    assert (high > 0).all()


@given(st.integers(2, 8))
def test_an_incomplete_group_weighs_like_a_whole_one(k: int) -> None:
    """E[(r - mean of k)^2] is (k-1)/k of the variance; the scale gives (G-1)/G for every k."""
    size, draws = 8, np.random.default_rng(0).normal(size=(20_000, k))
    centred = draws - draws.mean(1, keepdims=True)

    (scaled,) = advantages_of([draws[0]], algorithm="dr_grpo", group_size=size)
    scale = float(np.abs(scaled).sum() / np.abs(centred[0]).sum())

    # What a policy gradient sees is E[A * (r - true mean)].
    assert float((centred * draws).mean()) * scale == pytest.approx((size - 1) / size, abs=0.03)


def test_a_lone_rollout_has_no_advantage_under_leave_one_out() -> None:
    assert leave_one_out(np.array([4.0])).tolist() == [0.0]


# -- samples --------------------------------------------------------------------------------------


def two_turn_sequence(agent: str = "policy", reward: float = 0.0) -> Sequence:
    return Sequence(
        agent=agent,
        token_ids=[1, 1, 1, 2, 2, 1, 1, 3, 3],
        loss_mask=[0, 0, 0, 1, 1, 0, 0, 1, 1],
        logprobs=[0, 0, 0, -0.1, -0.2, 0, 0, -0.3, -0.4],
        spans=[
            VersionSpan(version=PolicyVersion(7), start=3, end=4),
            VersionSpan(version=PolicyVersion(8), start=4, end=5),
            VersionSpan(version=PolicyVersion(8), start=7, end=9),
        ],
        reward=reward,
    )


def test_a_sample_holds_what_was_sampled_and_its_versions() -> None:
    sample = sample_of("g", "r", two_turn_sequence())

    assert sample is not None
    assert sample.trained.tolist() == [3, 4, 7, 8]
    assert sample.versions.tolist() == [7, 8, 8, 8]
    assert sample.behaviour_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert sample.oldest_version == 7
    assert sample.inputs.tolist() == [1, 1, 1, 2, 2, 1, 1, 3]


def test_agents_of_an_episode_are_compared_with_their_like() -> None:
    def episode(name: str, maker: float, breaker: float) -> Rollout:
        sequences = [two_turn_sequence("maker", maker), two_turn_sequence("breaker", breaker)]
        return Rollout(rollout_id=name, sequences=sequences, reward=maker + breaker)

    group = [episode("a", 1.0, 10.0), episode("b", 0.0, 30.0)]
    samples = batch_samples([("g", group)], Weighing(algorithm="dr_grpo", group_size=2))

    found = {sample.rollout_id: sample.advantage for sample in samples}
    assert found == {"a": 0.5, "b": -0.5, "a/1": -10.0, "b/1": 10.0}


def test_only_the_chosen_agents_are_trained_on() -> None:
    group = [
        Rollout(
            rollout_id=name,
            sequences=[two_turn_sequence("maker", 5.0), two_turn_sequence("breaker", reward)],
        )
        for name, reward in (("a", 1.0), ("b", 0.0))
    ]

    weighing = Weighing(algorithm="dr_grpo", group_size=2)
    samples = batch_samples([("g", group)], weighing, agents=["breaker"])

    assert {sample.rollout_id: sample.advantage for sample in samples} == {"a/1": 0.5, "b/1": -0.5}


def test_a_lone_sequence_has_its_episodes_reward() -> None:
    group = [
        Rollout(rollout_id=name, sequences=[two_turn_sequence()], reward=reward)
        for name, reward in (("a", 2.0), ("b", 0.0))
    ]

    samples = batch_samples([("g", group)], Weighing(algorithm="dr_grpo", group_size=2))

    assert [sample.advantage for sample in samples] == [1.0, -1.0]


# -- corrections ----------------------------------------------------------------------------------

INDEX = torch.tensor([0, 0, 1, 1])
RATIOS = torch.tensor([4.0, 0.5, 1.1, 0.9])
"""Sample 0: product 2, geometric mean sqrt 2. Sample 1: product 0.99."""


def corrected(rule: str, *, cap: float = 2.0, advantages: list[float] | None = None) -> list[float]:
    behaviour = torch.full((4,), -1.0)
    policy = (behaviour + RATIOS.log()).requires_grad_(True)
    result = correct(
        rule,
        policy_logprobs=policy,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor(advantages or [1.0, 1.0, 1.0, 1.0]),
        sample_index=INDEX,
        samples=2,
        cap=cap,
    )
    assert not result.weights.requires_grad
    assert not result.old_logprobs.requires_grad
    against_behaviour = torch.equal(result.old_logprobs, behaviour)
    assert against_behaviour == (rule in ("clip", "geometric_mask", "opsm"))
    return [round(weight, 4) for weight in result.weights.tolist()]


@pytest.mark.parametrize(
    ("rule", "cap", "weights"),
    [
        ("none", 2.0, [1, 1, 1, 1]),
        ("clip", 2.0, [1, 1, 1, 1]),
        ("token_truncate", 2.0, [2, 0.5, 1.1, 0.9]),
        ("token_mask", 2.0, [0, 0.5, 1.1, 0.9]),
        ("token_mask", 1.5, [0, 0, 1.1, 0.9]),
        ("decoupled", 2.0, [0, 0.5, 1.1, 0.9]),
        ("decoupled", 1.5, [0, 0.5, 1.1, 0.9]),
        ("sequence_truncate", 1.5, [1.5, 1.5, 0.99, 0.99]),
        ("sequence_mask", 1.5, [0, 0, 0.99, 0.99]),
        ("sequence_mask", 2.5, [2, 2, 0.99, 0.99]),
        ("geometric_mask", 1.3, [0, 0, 1, 1]),
        ("geometric_mask", 1.5, [1, 1, 1, 1]),
    ],
)
def test_a_correction_weighs_tokens_as_its_paper_says(
    rule: str, cap: float, weights: list[float]
) -> None:
    assert corrected(rule, cap=cap) == pytest.approx(weights, abs=1e-3)


def test_opsm_leaves_out_bad_sequences_the_policy_has_left() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    drift = 2 * OPSM_KL
    policy = behaviour - torch.tensor([drift, drift, drift, drift])
    result = correct(
        "opsm",
        policy_logprobs=policy,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0]),
        sample_index=INDEX,
        samples=2,
        cap=2.0,
    )

    assert result.weights.tolist() == [0, 0, 1, 1]


def test_every_rule_of_the_job_is_there() -> None:
    named = TrainSpec.model_fields["correction"].annotation

    assert set(RULES) == set(named.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_on_policy_every_correction_is_neutral(rule: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    result = correct(
        rule,
        policy_logprobs=logprobs,
        behaviour_logprobs=logprobs.clone(),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sample_index=INDEX,
        samples=2,
        cap=2.0,
    )

    assert result.weights.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_absurd_ratios_stay_finite(rule: str) -> None:
    result = correct(
        rule,
        policy_logprobs=torch.tensor([-1e4, -1.0, -1.0, -1.0]),
        behaviour_logprobs=torch.tensor([-1.0, -1e4, -1.0, -1.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sample_index=INDEX,
        samples=2,
        cap=2.0,
    )

    assert torch.isfinite(result.weights).all()


# -- staleness ------------------------------------------------------------------------------------


def test_the_spread_of_a_batch_is_measured_by_its_oldest_tokens(make_sample: MakeSample) -> None:
    samples = [make_sample([1, 2], [1], version=3), make_sample([1, 2], [1], version=5)]

    spread = version_spread(samples, live_version=6)

    assert (spread.mean, spread.largest, spread.within_batch) == (2.0, 3, 2)
    assert spread.histogram == {1: 1, 3: 1}


def test_effective_sample_size_is_the_share_of_equal_weights() -> None:
    even = torch.zeros(10)
    one_of_four = torch.tensor([100.0, 0.0, 0.0, 0.0])

    assert effective_sample_size(even) == pytest.approx(1.0)
    assert effective_sample_size(one_of_four) == pytest.approx(0.25)
    assert effective_sample_size(torch.tensor([])) == 1.0


def test_mismatch_counts_only_tokens_of_the_very_same_weights() -> None:
    log_ratio = torch.tensor([0.0, 0.0, 5.0])

    assert mismatch_kl(log_ratio, torch.tensor([True, True, False])) == 0.0
    assert mismatch_kl(log_ratio, torch.tensor([False, False, True])) > 100.0


# -- guard ----------------------------------------------------------------------------------------


def signals(*, ess: float = 1.0, loss: float = 0.0, mismatch: float = 0.0) -> Signals:
    return Signals(loss=loss, grad_norm=1.0, ess=ess, mismatch_kl=mismatch)


@pytest.mark.parametrize(
    ("bad", "action"),
    [
        (signals(ess=0.4), "slow"),
        (signals(mismatch=0.2), "slow"),
        (signals(ess=0.2), "tighten"),
        (signals(ess=0.05), "stop"),
        (signals(loss=math.nan), "stop"),
        (signals(mismatch=2.0), "stop"),
    ],
)
def test_the_guard_acts_when_a_threshold_is_crossed_in_a_row(bad: Signals, action: str) -> None:
    guard = Guard()

    verdicts = [guard.observe(bad).action for _ in range(PATIENCE)]

    assert verdicts == ["ok"] * (PATIENCE - 1) + [action]


def test_one_bad_step_does_nothing() -> None:
    guard = Guard()

    verdicts = [guard.observe(s).action for s in [signals(ess=0.05), signals()] * 10]

    assert set(verdicts) == {"ok"}


def test_the_guard_steps_back_when_steps_are_healthy_again() -> None:
    guard = Guard()
    for _ in range(PATIENCE):
        guard.observe(signals(ess=0.2))
    assert (guard.allowed_staleness(2), guard.allowed_depth(2)) == (1, 1)

    for _ in range(2 * PATIENCE):
        verdict = guard.observe(signals())

    assert verdict.action == "ok"
    assert (guard.allowed_staleness(2), guard.allowed_depth(2)) == (2, 2)


def test_a_guard_that_is_off_never_acts() -> None:
    guard = Guard(enabled=False)

    assert {guard.observe(signals(ess=0.01)).action for _ in range(9)} == {"ok"}


# -- tickets --------------------------------------------------------------------------------------


@given(
    open_groups=st.integers(0, 50),
    per_step=st.integers(1, 8),
    depth=st.integers(0, 4),
    steps_left=st.integers(0, 10),
)
def test_open_tickets_never_exceed_the_staleness_bound(
    open_groups: int, per_step: int, depth: int, steps_left: int
) -> None:
    count = room(
        open_groups=open_groups, groups_per_step=per_step, depth=depth, steps_left=steps_left
    )

    assert count >= 0
    if count:
        assert open_groups + count <= (depth + 1) * per_step
        assert open_groups + count <= steps_left * per_step


@given(
    live=st.integers(0, 100),
    ahead=st.integers(0, 40),
    per_step=st.integers(1, 8),
    sync_every=st.integers(1, 4),
    since=st.integers(0, 3),
    bound=st.integers(0, 4),
)
def test_no_group_is_born_stale(
    live: int, ahead: int, per_step: int, sync_every: int, since: int, bound: int
) -> None:
    start = oldest_start(
        live_version=live,
        steps_since_sync=since,
        ahead=ahead,
        groups_per_step=per_step,
        sync_every=sync_every,
        max_staleness=bound,
    )

    # Simulate the steps before this group's turn, each moving the version when a sync is due.
    version, steps = live, since
    for _ in range(ahead // per_step):
        steps += 1
        if steps % sync_every == 0:
            version += 1
    if since < sync_every:
        assert version - start <= bound


@pytest.mark.parametrize(
    ("steps_left", "open_groups", "count"), [(9, 0, 10), (9, 8, 2), (1, 0, 6), (0, 0, 0)]
)
def test_over_sampling_orders_more_than_any_step_needs(
    steps_left: int, open_groups: int, count: int
) -> None:
    found = room(
        open_groups=open_groups, groups_per_step=4, depth=1, steps_left=steps_left, oversample=2
    )

    assert found == count


def test_groups_ordered_beyond_those_needed_may_start_at_once() -> None:
    """Four are needed, six are ordered: the last two must not wait for the next version."""
    starts = [
        oldest_start(
            live_version=5,
            steps_since_sync=0,
            ahead=ahead,
            groups_per_step=4,
            sync_every=1,
            max_staleness=0,
            oversample=2,
        )
        for ahead in range(7)
    ]

    assert starts == [5, 5, 5, 5, 5, 5, 6]


def test_tickets_of_a_number_are_always_the_same() -> None:
    book = TicketBook(job=JobSpec(name="j"), run_id="r1")

    first, again = (book.train(17, min_version=3, now_s=1.0) for _ in range(2))

    assert first == again
    assert first.ticket_id == "r1-000017"
    assert book.train(18, min_version=3, now_s=1.0).task.seed != first.task.seed


def test_evaluation_tickets_are_pinned_and_held_out() -> None:
    job = JobSpec(name="j", eval=EvalSpec(episodes=3))
    tickets = TicketBook(job=job, run_id="r1").evaluation(4, now_s=1.0)

    assert [t.policy_version for t in tickets] == [4, 4, 4]
    assert {t.purpose for t in tickets} == {"eval"}
    assert {t.task.split for t in tickets} == {"eval"}
    assert len({t.task.seed for t in tickets}) == 3
    assert [t.sampling.temperature for t in tickets] == [0.0, 0.0, 0.0]


# -- schedule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]),
    ],
)
def test_the_rate_warms_up_and_follows_its_schedule(schedule: str, rates: list[float]) -> None:
    spec = TrainSpec.model_validate(
        {"lr": 1.0, "steps": 6, "warmup_steps": 2, "schedule": schedule}
    )

    assert [round(learning_rate(spec, step), 4) for step in range(6)] == rates


# -- account --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earned", "count"), [(([0.1] * 3, [0.7] * 3), 0), (([0.1] * 3, [0.1, 0.1, 0.7]), 1)]
)
def test_groups_that_teach_are_those_whose_rewards_differ(
    earned: tuple[list[float], ...], count: int
) -> None:
    groups = [
        (f"g{at}", [intake_rollout(f"g{at}.{n}", reward=r) for n, r in enumerate(rewards)])
        for at, rewards in enumerate(earned)
    ]
    samples = batch_samples(groups, Weighing(algorithm="grpo", group_size=3))

    assert groups_with_signal(samples) == count
