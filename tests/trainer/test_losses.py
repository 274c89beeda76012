"""Losses against closed forms, and the gradient of one step against a float64 reference."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.job.spec import TrainSpec
from deltawire_trainer.learner import Learner
from deltawire_trainer.losses.algorithms import ALGORITHMS
from deltawire_trainer.losses.reduction import Totals
from deltawire_trainer.losses.terms import LossInput, k3
from deltawire_trainer.optimizer import build_optimizer
from deltawire_trainer.policy import Policy
from deltawire_trainer.samples import TrainingSample

from .conftest import VOCABULARY, MakeSample, tiny_llama
from .trl_table import BETA, numbers
from .trl_table import CLIP_HIGH as TRL_CLIP_HIGH
from .trl_table import CLIP_LOW as TRL_CLIP_LOW
from .trl_table import LENGTHS as TRL_LENGTHS
from .trl_table import MAX_TOKENS as TRL_MAX_TOKENS

GOLDEN = Path(__file__).parents[1] / "golden"

LENGTHS = [3, 1, 4]
CLIP_LOW, CLIP_HIGH = 0.2, 0.3


def ragged_batch(seed: int) -> tuple[LossInput, torch.Tensor]:
    """Three samples whose ratios lie inside and outside the clip range; the policy's leaf."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
    policy = -torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64) * 2
    policy.requires_grad_(True)
    old = policy.detach() + torch.randn(sum(LENGTHS), generator=generator).double() * 0.5
    advantages = torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64)[index]
    batch = LossInput(
        policy_logprobs=policy,
        old_logprobs=old,
        advantages=advantages,
        sample_index=index,
        samples=3,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
    )
    return batch, policy


def padded(batch: LossInput) -> list[tuple[list[float], list[float], float]]:
    """(policy, old, advantage) of each sample, as plain numbers."""
    rows = []
    for sample in range(batch.samples):
        here = batch.sample_index == sample
        rows.append(
            (
                batch.policy_logprobs[here].tolist(),
                batch.old_logprobs[here].tolist(),
                float(batch.advantages[here][0]),
            )
        )
    return rows


def surrogate(ratio: float, advantage: float) -> float:
    bounded = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
    return -min(ratio * advantage, bounded * advantage)


def by_hand(name: str, batch: LossInput, max_tokens: int) -> float:
    """The loss of each algorithm, written out over plain lists from its paper."""
    rows = padded(batch)
    tokens = sum(len(policy) for policy, _, _ in rows)
    clipped = [
        [surrogate(math.exp(p - o), a) for p, o in zip(policy, old, strict=True)]
        for policy, old, a in rows
    ]
    match name:
        case "grpo":
            return sum(sum(row) / len(row) for row in clipped) / len(rows)
        case "dr_grpo":
            return sum(map(sum, clipped)) / (len(rows) * max_tokens)
        case "dapo" | "reinforce_pp":
            return sum(map(sum, clipped)) / tokens
        case "cispo":
            weighed = [
                -min(math.exp(p - o), 1 + CLIP_HIGH) * a * p
                for policy, old, a in rows
                for p, o in zip(policy, old, strict=True)
            ]
            return sum(weighed) / tokens
        case "gspo":
            means = [
                (sum(p - o for p, o in zip(policy, old, strict=True)) / len(policy), a)
                for policy, old, a in rows
            ]
            return sum(surrogate(math.exp(m), a) for m, a in means) / len(rows)
        case "rloo":
            return sum(
                surrogate(math.exp(sum(policy) - sum(old)), a) for policy, old, a in rows
            ) / len(rows)
    raise AssertionError(name)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_has_the_value_its_paper_gives(name: str, seed: int) -> None:
    batch, _ = ragged_batch(seed)
    algorithm = ALGORITHMS[name]
    totals = Totals(samples=3, tokens=sum(LENGTHS), max_tokens=7)

    token_loss = algorithm.loss(batch)
    loss = algorithm.reduce(token_loss.values, batch.sample_index, 3, totals)

    assert loss.item() == pytest.approx(by_hand(name, batch, 7), rel=1e-9)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"cispo"}))
def test_clipped_tokens_carry_no_gradient(name: str) -> None:
    batch, policy = ragged_batch(3)

    token_loss = ALGORITHMS[name].loss(batch)
    token_loss.values.sum().backward()

    stopped = token_loss.clipped_low | token_loss.clipped_high
    assert policy.grad is not None
    assert torch.equal(policy.grad == 0, stopped)


def test_cispo_keeps_every_gradient_and_bounds_its_weight() -> None:
    batch, policy = ragged_batch(3)

    token_loss = ALGORITHMS["cispo"].loss(batch)
    token_loss.values.sum().backward()

    assert policy.grad is not None
    assert (policy.grad != 0).all()
    assert (policy.grad.abs() <= (1 + CLIP_HIGH) * batch.advantages.abs() + 1e-12).all()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@given(cut=st.integers(1, 2))
@settings(max_examples=4, deadline=None)
def test_micro_batches_add_up_to_the_undivided_batch(name: str, cut: int) -> None:
    batch, _ = ragged_batch(1)
    algorithm = ALGORITHMS[name]
    totals = Totals(samples=3, tokens=sum(LENGTHS), max_tokens=9)

    def share(first: int, last: int) -> float:
        here = (batch.sample_index >= first) & (batch.sample_index < last)
        part = LossInput(
            policy_logprobs=batch.policy_logprobs[here],
            old_logprobs=batch.old_logprobs[here],
            advantages=batch.advantages[here],
            sample_index=batch.sample_index[here] - first,
            samples=last - first,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
        )
        values = algorithm.loss(part).values
        return algorithm.reduce(values, part.sample_index, part.samples, totals).item()

    assert share(0, cut) + share(cut, 3) == pytest.approx(share(0, 3), rel=1e-9)


def rollouts_of_two_groups(policy: Policy) -> list[TrainingSample]:
    """Unequal lengths, shared prompts, masked observations between two turns, stale logprobs."""
    rng = np.random.default_rng(5)
    samples = []
    for group, prompt in enumerate(([1, 2, 3, 4], [1, 2, 9])):
        for member in range(3):
            first = rng.integers(0, VOCABULARY, 3 + member).tolist()
            second = rng.integers(0, VOCABULARY, 2).tolist()
            ids = [*prompt, *first, 30, 31, *second]
            trained = list(range(len(prompt), len(prompt) + len(first)))
            trained += [len(ids) - 2, len(ids) - 1]
            samples.append(
                TrainingSample(
                    group_id=str(group),
                    rollout_id=f"{group}.{member}",
                    token_ids=np.array(ids),
                    trained=np.array(trained),
                    behaviour_logprobs=rng.normal(-4.0, 0.6, len(trained)).astype(np.float32),
                    versions=np.zeros(len(trained), dtype=np.int64),
                    advantage=float(rng.normal()),
                )
            )
    return samples


def reference_gradient(samples: list[TrainingSample], spec: TrainSpec) -> dict[str, torch.Tensor]:
    """The same step written plainly: one float64 forward per sample, no packing, GRPO's formula."""
    model = tiny_llama().double()
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids)[None]
        logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        chosen = logprobs[sample.trained - 1, ids[0, sample.trained]]
        behaviour = torch.from_numpy(sample.behaviour_logprobs).double()
        weight = (chosen.detach() - behaviour).exp().clamp(max=spec.correction_cap)
        loss = loss - (weight * sample.advantage * chosen).mean() / len(samples)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tokens_per_microbatch", [4096, 20])
def test_the_gradient_of_a_step_equals_a_float64_reference(
    policy: Policy, tokens_per_microbatch: int
) -> None:
    spec = TrainSpec(autocast=False, tokens_per_microbatch=tokens_per_microbatch)
    samples = rollouts_of_two_groups(policy)
    learner = Learner(policy, build_optimizer(policy, spec), spec, max_tokens=8)

    gradient = learner.accumulate(samples, live_version=0)

    expected = reference_gradient(samples, spec)
    assert gradient.signal
    for name, master in policy.masters.items():
        assert master.grad is not None
        scale = expected[name].abs().max().item()
        error = (master.grad.double() - expected[name]).abs().max().item()
        assert error <= 1e-5 * max(scale, 1e-3), name


def test_working_copy_gradients_are_collected_in_fp32(make_sample: MakeSample) -> None:
    exact = Policy(tiny_llama())
    mixed = Policy(tiny_llama(), working_dtype=torch.bfloat16)
    spec = TrainSpec(tokens_per_microbatch=20)
    samples = rollouts_of_two_groups(exact)

    for policy in (exact, mixed):
        learner = Learner(policy, build_optimizer(policy, spec), spec, max_tokens=8)
        learner.accumulate(samples, live_version=0)

    flat = [
        torch.cat([m.grad.flatten() for m in policy.masters.values() if m.grad is not None])
        for policy in (exact, mixed)
    ]
    assert flat[1].dtype == torch.float32
    assert torch.cosine_similarity(flat[0], flat[1], dim=0) > 0.99
    assert all(weight.grad is None for weight in mixed.working.values())


def test_after_an_update_the_working_copy_is_the_rounded_master() -> None:
    policy = Policy(tiny_llama(), working_dtype=torch.bfloat16)
    spec = TrainSpec(lr=1e-2)
    learner = Learner(policy, build_optimizer(policy, spec), spec, max_tokens=8)
    before = copy.deepcopy({name: m.detach() for name, m in policy.masters.items()})

    gradient = learner.accumulate(rollouts_of_two_groups(policy), live_version=0)
    learner.apply(gradient, step=0)

    for name, master in policy.masters.items():
        assert not torch.equal(master, before[name]), name
        assert torch.equal(policy.working[name], master.bfloat16()), name


def test_samples_without_an_advantage_cost_nothing_and_move_nothing(
    policy: Policy, make_sample: MakeSample
) -> None:
    spec = TrainSpec()
    learner = Learner(policy, build_optimizer(policy, spec), spec, max_tokens=4)
    before = {name: m.detach().clone() for name, m in policy.masters.items()}

    gradient = learner.accumulate([make_sample([1, 2, 3], [2], advantage=0.0)], live_version=0)
    update = learner.apply(gradient, step=0)

    assert not gradient.signal
    assert not update.applied
    assert all(torch.equal(m, before[name]) for name, m in policy.masters.items())


def test_a_gradient_that_is_not_finite_is_left_out(policy: Policy, make_sample: MakeSample) -> None:
    spec = TrainSpec(correction="none")
    learner = Learner(policy, build_optimizer(policy, spec), spec, max_tokens=4)
    before = {name: m.detach().clone() for name, m in policy.masters.items()}

    sample = make_sample([1, 2, 3], [2], advantage=float("inf"))
    update = learner.apply(learner.accumulate([sample], live_version=0), step=0)

    assert not update.applied
    assert all(torch.equal(m, before[name]) for name, m in policy.masters.items())


def test_a_reference_policy_pulls_back(policy: Policy, make_sample: MakeSample) -> None:
    """With no advantage at all, the KL term alone moves the policy towards the reference."""
    spec = TrainSpec(kl_coef=1.0, lr=1e-2)
    reference = Policy(tiny_llama(seed=1))
    learner = Learner(
        policy, build_optimizer(policy, spec), spec, max_tokens=4, reference=reference
    )
    sample = make_sample([1, 2, 3, 4], [2, 3], advantage=0.0)

    found = []
    for step in range(15):
        gradient = learner.accumulate([sample], live_version=0)
        found.append(gradient.metrics["reference_kl"])
        learner.apply(gradient, step=step)

    assert found[-1] < 0.5 * found[0]


def test_an_entropy_bonus_raises_entropy(policy: Policy, make_sample: MakeSample) -> None:
    spec = TrainSpec(entropy_coef=1.0, lr=1e-2)
    learner = Learner(policy, build_optimizer(policy, spec), spec, max_tokens=4)
    sample = make_sample([1, 2, 3, 4], [2, 3], advantage=0.0)

    found = []
    for step in range(10):
        gradient = learner.accumulate([sample], live_version=0)
        found.append(gradient.metrics["entropy"])
        learner.apply(gradient, step=step)

    assert found[-1] > found[0] + 0.1


def flat_numbers() -> tuple[LossInput, torch.Tensor]:
    """The numbers of trl_table.py, laid end to end; and the reference logprobs."""
    data = numbers()
    mask = data["mask"].bool()
    index = torch.arange(len(TRL_LENGTHS)).repeat_interleave(torch.tensor(TRL_LENGTHS))
    batch = LossInput(
        policy_logprobs=data["policy"][mask],
        old_logprobs=data["old"][mask],
        advantages=data["advantages"][index],
        sample_index=index,
        samples=len(TRL_LENGTHS),
        clip_low=TRL_CLIP_LOW,
        clip_high=TRL_CLIP_HIGH,
    )
    return batch, data["reference"][mask]


@pytest.mark.parametrize("name", ["grpo", "grpo+kl", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_a_loss_equals_trls(name: str) -> None:
    """Against values that TRL's own code gave for the same numbers (tests/golden)."""
    expected = json.loads((GOLDEN / "trl_losses.json").read_text())[name]
    batch, reference = flat_numbers()
    algorithm = ALGORITHMS[name.removesuffix("+kl")]
    totals = Totals(
        samples=batch.samples, tokens=len(batch.sample_index), max_tokens=TRL_MAX_TOKENS
    )

    values = algorithm.loss(batch).values
    if name.endswith("+kl"):
        values = values + BETA * k3(reference - batch.policy_logprobs)
    loss = algorithm.reduce(values, batch.sample_index, batch.samples, totals)

    assert loss.item() == pytest.approx(expected, rel=1e-6)
