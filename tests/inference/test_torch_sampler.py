"""Drawing tokens: the distribution is the one that the logprobs speak of."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltawire.protocol.errors import EngineError
from deltawire.protocol.generation import Sampling
from deltawire_inference.engines.torch.sampler import Ask, draw

logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40)
uniforms = st.floats(0, 1, exclude_max=True)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
)


def expected_support(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Ids that may be drawn with their logprobs, by the plainest code there is."""
    probs = torch.softmax(logits.double() / sampling.temperature, -1)
    order = probs.argsort(descending=True, stable=True).tolist()
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(probs[i].item() for i in order)
    kept, mass = [], 0.0
    for i in order:
        if sampling.top_p < 1.0 and mass >= sampling.top_p:
            break
        kept.append(i)
        mass += probs[i].item() / total
    rest = sum(probs[i].item() for i in kept)
    return {i: math.log(probs[i].item() / rest) for i in kept}


@settings(max_examples=300, deadline=None)
@example(logits=[0.0, 12.0], sampling=Sampling(temperature=0.3), uniform=0.0)
@given(logits=logit_rows, sampling=samplings, uniform=uniforms)
def test_a_drawn_token_has_the_logprob_of_the_narrowed_distribution(
    logits: list[float], sampling: Sampling, uniform: float
) -> None:
    row = torch.tensor(logits)

    (drawn,) = draw(row[None], [Ask(sampling=sampling, uniform=uniform, want_allowed=True)])

    support = expected_support(row, sampling)
    if drawn.allowed is not None:
        assert drawn.token_id in drawn.allowed
    if drawn.token_id in support:  # at a tie or a border, which of two tokens stays is open
        assert drawn.logprob == pytest.approx(support[drawn.token_id], abs=2e-2)
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        assert drawn.token_id in support and drawn.allowed is None


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    asks = [Ask(sampling=Sampling(), uniform=(i + 0.5) / 1000) for i in range(1000)]

    drawn = draw(logits.expand(1000, 4), asks)

    counts = torch.bincount(torch.tensor([d.token_id for d in drawn]), minlength=4) / 1000
    torch.testing.assert_close(counts, torch.softmax(logits, -1), atol=2e-3, rtol=0)


def test_a_token_of_no_probability_is_never_drawn_at_the_ends_of_the_interval() -> None:
    logits = torch.tensor([-math.inf, 0.0, 0.0, -math.inf])
    for uniform in (0.0, 0.5, 1.0 - 2**-53):
        (drawn,) = draw(logits[None], [Ask(sampling=Sampling(), uniform=uniform)])
        assert drawn.token_id in (1, 2)


def test_greedy_takes_the_likeliest_and_reports_its_untempered_logprob() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    (drawn,) = draw(logits, [Ask(sampling=Sampling(temperature=0.0, top_k=2), uniform=0.99)])

    assert drawn.token_id == 1
    assert drawn.logprob == pytest.approx(torch.log_softmax(logits[0], -1)[1].item())


def test_a_wide_nucleus_is_found_beyond_the_guess() -> None:
    logits = torch.zeros(5000)
    (drawn,) = draw(
        logits[None], [Ask(sampling=Sampling(top_p=0.9), uniform=0.5, want_allowed=True)]
    )

    assert drawn.allowed is not None and len(drawn.allowed) == pytest.approx(4500, abs=2)
    assert drawn.logprob == pytest.approx(-math.log(len(drawn.allowed)), abs=1e-3)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(EngineError, match="not finite"):
        draw(torch.tensor([[0.0, math.nan]]), [Ask(sampling=Sampling(), uniform=0.1)])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-45),
        Sampling(temperature=1e-30, top_k=2),
        Sampling(temperature=1e38),
        Sampling(top_p=5e-324),
        Sampling(top_p=1e-45, top_k=3),
        Sampling(top_k=2**70),
    ],
    ids=repr,
)
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0])
def test_whatever_a_request_may_ask_for_draws_a_token(sampling: Sampling, uniform: float) -> None:
    logits = torch.tensor([[30.0, -2.0, 31.0, 1.0]])
    ask = Ask(sampling=sampling, uniform=uniform, top_logprobs=4, want_allowed=True)
    (drawn,) = draw(logits, [ask])
    assert 0 <= drawn.token_id < 4
    assert math.isfinite(drawn.logprob)
    assert all(map(math.isfinite, drawn.top_logprobs.values()))


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    logits = torch.tensor([[1.0, 1.001, 0.0]])
    (drawn,) = draw(logits, [Ask(sampling=Sampling(temperature=1e-12), uniform=0.1)])
    assert drawn.token_id == 1
