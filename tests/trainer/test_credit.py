"""Credit inside an episode: the formula against a plain float64 loop, and what it leaves alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltawire.job.spec import JobSpec, TrainSpec
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence, Task, Turn
from deltawire.protocol.versions import PolicyVersion, VersionSpan
from deltawire_trainer.advantages import STD_EPS
from deltawire_trainer.credit import Credit
from deltawire_trainer.intake import Rules, judge
from deltawire_trainer.learner import Learner
from deltawire_trainer.optimizer import build_optimizer
from deltawire_trainer.policy import Policy
from deltawire_trainer.samples import TrainingSample, Weighing, batch_samples

from .conftest import tiny_llama

TURN = 2
"""Sampled tokens of a turn; one token is read before each."""


def played(name: str, turns: list[float | None], *, reward: float = 0.0) -> Rollout:
    """An episode of so many turns with their scores."""
    ids, mask, made = [1], [0], []
    for score in turns:
        ids.append(2)
        mask.append(0)
        made.append(Turn(start=len(ids), end=len(ids) + TURN, reward=score))
        ids += [3 + len(made), 9]
        mask += [1] * TURN
    sequence = Sequence(
        token_ids=ids,
        loss_mask=mask,
        logprobs=[-1.0 * m for m in mask],
        spans=[VersionSpan(version=PolicyVersion(0), start=2, end=len(ids))],
        turns=made,
    )
    return Rollout(rollout_id=name, sequences=[sequence], reward=reward)


def token_scored(name: str, scores: list[float], *, reward: float = 0.0) -> Rollout:
    """An episode of one turn whose tokens have scores."""
    length = len(scores)
    sequence = Sequence(
        token_ids=[1, *[5] * length],
        loss_mask=[0, *[1] * length],
        logprobs=[0.0, *[-1.0] * length],
        spans=[VersionSpan(version=PolicyVersion(0), start=1, end=length + 1)],
        token_rewards=[7.0, *scores],
    )
    return Rollout(rollout_id=name, sequences=[sequence], reward=reward)


def weighed(rollouts: list[Rollout], credit: Credit, **options: object) -> list[TrainingSample]:
    weighing = Weighing(
        **{"algorithm": "grpo", "group_size": len(rollouts), "credit": credit, **options}  # type: ignore[arg-type]
    )
    return batch_samples([("g", rollouts)], weighing)


def plain(groups: list[list[tuple[float, list[float]]]], *, normalised: bool) -> list[list[float]]:
    """[units] advantages of each rollout (reward, scores), one loop for each sum of the formula."""
    found = []
    for group in groups:
        for reward, scores in group:
            outcome = _against([r for r, _ in group], reward, len(group), normalised)
            advantages = []
            for unit in range(len(scores)):
                reached = [sum(other[unit:]) for _, other in group if len(other) > unit]
                extra = _against(reached, sum(scores[unit:]), len(group), normalised)
                advantages.append(outcome + extra)
            found.append(advantages)
    return found


def _against(all_of_them: list[float], mine: float, group_size: int, normalised: bool) -> float:
    k = len(all_of_them)
    if k < 2:
        return 0.0
    mean = sum(all_of_them) / k
    deviation = (sum((value - mean) ** 2 for value in all_of_them) / (k - 1)) ** 0.5
    scale = (k / (k - 1)) * ((group_size - 1) / group_size)
    return scale * (mine - mean) / ((deviation + STD_EPS) if normalised else 1.0)


scores = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.5]), min_size=1, max_size=4)
episodes = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), scores)
groups = st.lists(episodes, min_size=2, max_size=5)


@pytest.mark.parametrize(("algorithm", "normalised"), [("grpo", True), ("dr_grpo", False)])
@given(group=groups)
def test_turn_and_token_credit_equal_a_float64_reference(
    algorithm: str, normalised: bool, group: list[tuple[float, list[float]]]
) -> None:
    expected = plain([group], normalised=normalised)

    turns = [played(str(i), list(s), reward=r) for i, (r, s) in enumerate(group)]
    tokens = [token_scored(str(i), s, reward=r) for i, (r, s) in enumerate(group)]

    for sample, values in zip(weighed(turns, "turn", algorithm=algorithm), expected, strict=True):
        assert sample.advantages == pytest.approx(np.repeat(values, TURN), rel=1e-5, abs=1e-5)
    for sample, values in zip(weighed(tokens, "token", algorithm=algorithm), expected, strict=True):
        assert sample.advantages == pytest.approx(values, rel=1e-5, abs=1e-5)


def test_a_score_reaches_its_turn_and_those_before_it_but_none_after() -> None:
    good, bad = weighed([played("a", [0.0, 1.0, 0.0]), played("b", [0.0, 0.0, 0.0])], "turn")

    assert (good.advantages[:4] > 0).all()
    assert (bad.advantages[:4] < 0).all()
    assert good.advantages[4:].tolist() == bad.advantages[4:].tolist() == [0.0, 0.0]


def test_a_turn_that_one_rollout_alone_reached_has_no_credit() -> None:
    longer, _ = weighed([played("a", [0.0, 5.0]), played("b", [5.0])], "turn")

    assert longer.advantages[2:].tolist() == [0.0, 0.0]


def test_scores_of_what_was_not_sampled_count_for_nothing() -> None:
    """`token_scored` puts 7.0 on the prompt."""
    samples = weighed([token_scored("a", [0.0]), token_scored("b", [1.0])], "token")

    assert samples[1].advantages[0] == pytest.approx(0.7070, abs=1e-3)


def test_credit_weighs_as_much_as_it_is_told() -> None:
    group = [played("a", [1.0], reward=1.0), played("b", [0.0], reward=0.0)]

    once, thrice = (weighed(group, "turn", credit_weight=w)[0].advantages[0] for w in (1.0, 3.0))
    alone = weighed(group, "episode")[0].advantages[0]

    assert once == pytest.approx(2 * alone)
    assert thrice == pytest.approx(4 * alone)


def test_without_scores_turn_credit_changes_nothing() -> None:
    group = [played("a", [None, None], reward=1.0), played("b", [None], reward=0.0)]

    pairs = zip(weighed(group, "turn"), weighed(group, "episode"), strict=True)

    assert all(a.advantages.tolist() == b.advantages.tolist() for a, b in pairs)


def test_equal_rewards_with_unequal_scores_are_a_signal_when_they_count() -> None:
    group = RolloutGroup(
        group_id="g", task=Task(), rollouts=[played("a", [1.0, 0.0]), played("b", [0.0, 1.0])]
    )

    def reason(credit: str) -> str:
        train = TrainSpec.model_validate({"algorithm": "dapo", "credit": credit, "group_size": 2})
        rules = Rules.of(JobSpec(name="j", train=train), vocabulary=61)
        return judge(group, rules, live_version=0, max_staleness=0).reason

    assert reason("episode") == "no_signal"
    assert reason("turn") == ""


@pytest.mark.parametrize("place", ["turn", "token"])
def test_a_score_that_is_no_number_makes_the_rollout_unusable(place: str) -> None:
    nan = float("nan")
    broken = played("a", [nan]) if place == "turn" else token_scored("a", [nan])
    group = RolloutGroup(group_id="g", task=Task(), rollouts=[broken, broken])
    rules = Rules.of(JobSpec(name="j"), vocabulary=61)

    assert judge(group, rules, live_version=0, max_staleness=0).reason == "unusable"


def test_the_gradient_of_a_step_with_turn_credit_equals_a_float64_reference() -> None:
    spec = TrainSpec(autocast=False, correction="none", credit="turn", group_size=3)
    group = [
        played("a", [1.0, 0.0], reward=1.0),
        played("b", [0.0, 0.5], reward=0.5),
        played("c", [0.25], reward=0.0),
    ]
    samples = batch_samples([("g", group)], Weighing.of(spec))
    policy = Policy(tiny_llama())
    Learner(policy, build_optimizer(policy, spec), spec, max_tokens=8).accumulate(
        samples, live_version=0
    )

    model = tiny_llama().double()
    loss = torch.zeros((), dtype=torch.float64)
    rewards = [(1.0, [1.0, 0.0]), (0.5, [0.0, 0.5]), (0.0, [0.25])]
    for rollout, advantages in zip(group, plain([rewards], normalised=True), strict=True):
        ids = torch.tensor(rollout.sequences[0].token_ids)
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        at = torch.tensor(rollout.sequences[0].loss_mask).nonzero()[:, 0]
        weights = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(TURN)
        loss = loss - (weights * logprobs[at - 1, ids[at]]).mean() / len(group)
    loss.backward()
    for name, parameter in model.named_parameters():
        grad = policy.masters[name].grad
        assert grad is not None
        assert parameter.grad is not None
        scale = max(parameter.grad.abs().max().item(), 1e-3)
        assert (grad.double() - parameter.grad).abs().max().item() <= 1e-5 * scale, name
