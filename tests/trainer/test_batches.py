"""Packing: a shared prefix costs one forward and changes no number."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire_trainer.batches import Budget, PackedBatch, pack
from deltawire_trainer.policy import Policy
from deltawire_trainer.samples import TrainingSample

from .conftest import VOCABULARY, MakeSample, tiny_llama

ROOMY = Budget(tokens=4096)


def logprobs_alone(policy: Policy, sample: TrainingSample) -> torch.Tensor:
    """The reference: one plain causal forward of the whole sequence."""
    ids = torch.from_numpy(sample.token_ids)[None]
    logits = policy.model(input_ids=ids, use_cache=False).logits[0] / policy.temperature
    predicted = logits[sample.trained - 1].log_softmax(-1)
    return predicted.gather(-1, ids[0, sample.trained][:, None])[:, 0]


def test_the_example_of_the_docstring(make_sample: MakeSample) -> None:
    p, q, a, b, c, d = 1, 2, 3, 4, 5, 6
    samples = [make_sample([p, q, a, b], [2, 3]), make_sample([p, q, c, d], [2, 3])]

    (batch,) = pack(samples, ROOMY)

    assert batch.input_ids.tolist() == [[p, q, a, c]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2]]
    assert batch.rows.tolist() == [1, 2, 3]
    assert batch.token_row.tolist() == [0, 1, 0, 2]
    assert batch.targets.tolist() == [a, b, c, d]
    assert batch.attention_mask is not None
    assert batch.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 0, 1],
    ]


def test_one_sequence_needs_no_mask(make_sample: MakeSample) -> None:
    (batch,) = pack([make_sample([1, 2, 3, 4], [2, 3])], ROOMY)

    assert batch.attention_mask is None


sequences = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=2, max_size=12), st.integers(0, 2**16), st.booleans()
    ),
    min_size=1,
    max_size=8,
)


def build(drawn: list[tuple[list[int], int, bool]]) -> list[TrainingSample]:
    """Sequences over four letters, so that prefixes are often shared; masks at random."""
    samples = []
    for number, (ids, bits, shared_prompt) in enumerate(drawn):
        token_ids = ([7, 8, 9] if shared_prompt else []) + ids
        trained = [i for i in range(1, len(token_ids)) if bits >> (i % 16) & 1] or [1]
        samples.append(
            TrainingSample(
                group_id="g",
                rollout_id=f"r{number:02d}",
                token_ids=np.array(token_ids),
                trained=np.array(trained),
                behaviour_logprobs=np.zeros(len(trained), dtype=np.float32),
                versions=np.zeros(len(trained), dtype=np.int64),
                advantage=float(number),
            )
        )
    return samples


@given(sequences, st.integers(4, 60))
@settings(max_examples=40, deadline=None)
def test_packed_logprobs_equal_those_of_separate_forwards(
    drawn: list[tuple[list[int], int, bool]], budget: int
) -> None:
    policy = Policy(tiny_llama(), temperature=0.7)
    samples = build(drawn)

    found: dict[str, torch.Tensor] = {}
    for batch in pack(samples, Budget(tokens=budget)):
        with torch.no_grad():
            tokens = policy.logprobs(batch).tokens
        for index, sample in enumerate(batch.samples):
            found[sample.rollout_id] = tokens[batch.sample_index == index]

    for sample in samples:
        with torch.no_grad():
            expected = logprobs_alone(policy, sample)
        torch.testing.assert_close(found[sample.rollout_id], expected, rtol=1e-4, atol=1e-5)


@given(sequences, st.integers(4, 60))
@settings(max_examples=60, deadline=None)
def test_every_trained_token_is_packed_once_and_budgets_hold(
    drawn: list[tuple[list[int], int, bool]], budget: int
) -> None:
    samples = build(drawn)

    batches = pack(samples, Budget(tokens=budget))

    packed = [sample.rollout_id for batch in batches for sample in batch.samples]
    assert sorted(packed) == sorted(sample.rollout_id for sample in samples)
    for batch in batches:
        assert batch.input_ids.shape[1] <= budget or len(batch.samples) == 1
        assert len(batch.targets) == sum(len(sample.trained) for sample in batch.samples)
        assert batch.sample_index.tolist() == sorted(batch.sample_index.tolist())


@given(sequences)
@settings(max_examples=30, deadline=None)
def test_the_order_of_samples_does_not_matter(drawn: list[tuple[list[int], int, bool]]) -> None:
    samples = build(drawn)

    def fingerprint(batches: list[PackedBatch]) -> list[object]:
        return [(b.input_ids.tolist(), b.targets.tolist(), b.advantages.tolist()) for b in batches]

    assert fingerprint(pack(samples, ROOMY)) == fingerprint(pack(samples[::-1], ROOMY))


def test_a_group_forwards_its_prompt_once(make_sample: MakeSample) -> None:
    prompt = list(range(10, 50))
    samples = [make_sample([*prompt, k, k + 1, 0], [40, 41, 42], name=str(k)) for k in range(8)]

    (batch,) = pack(samples, ROOMY)

    assert batch.input_ids.shape[1] == len(prompt) + 8 * 2


def test_architectures_that_cannot_share_travel_alone(make_sample: MakeSample) -> None:
    samples = [make_sample([1, 2, 3], [2], name="a"), make_sample([1, 2, 4], [2], name="b")]

    batches = pack(samples, Budget(tokens=100, share_prefixes=False))

    assert [batch.attention_mask for batch in batches] == [None, None]


def test_a_sampling_mask_renormalises_over_the_recorded_set(
    policy: Policy, make_sample: MakeSample
) -> None:
    sample = make_sample([1, 2, 3, 4], [2, 3], sampling_mask=[[3], [4, 5, 6]])

    (batch,) = pack([sample], ROOMY)
    tokens = policy.logprobs(batch).tokens

    logits = policy.model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0]
    expected = logits[2, 4] - logits[2, [4, 5, 6]].logsumexp(-1)
    assert tokens[0].item() == pytest.approx(0.0, abs=1e-6)
    assert tokens[1].item() == pytest.approx(expected.item(), abs=1e-5)


def test_entropy_is_that_of_the_distribution(policy: Policy, make_sample: MakeSample) -> None:
    (batch,) = pack([make_sample([1, 2, 3], [2])], ROOMY)

    entropy = policy.logprobs(batch).entropy

    logits = policy.model(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
    assert entropy.item() == pytest.approx(
        torch.distributions.Categorical(logits=logits).entropy().item(), abs=1e-5
    )
    assert logits.shape == (VOCABULARY,)
