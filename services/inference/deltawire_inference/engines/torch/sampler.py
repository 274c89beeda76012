"""Draw tokens, and say under which distribution they were drawn.

Logprobs are those of the distribution sampled from: after temperature, top-k and top-p, in fp32. A
greedy token has the logprob of the untempered distribution. One uniform number decides one token
(inverse of the cumulative distribution), so what a request draws does not depend on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deltawire.protocol.errors import EngineError
from deltawire.protocol.generation import Sampling

_LARGEST_UNIFORM = 1.0 - 2.0**-23
"""Below 1 by enough that its product with a sum of fp32 stays below that sum."""
_COLDEST = 1e-5
"""Colder than this is greedy: a logit divided by less may leave fp32."""
_SMALLEST_TOP_P = torch.finfo(torch.float32).tiny
"""A smaller one is 0 in fp32, below which no token's mass lies."""
_NUCLEUS_GUESS = 1024
"""A nucleus is mostly smaller than this; sorting the whole vocabulary is the slow way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How one row draws its next token."""

    sampling: Sampling
    uniform: float
    """In [0, 1), from the request's own generator."""
    top_logprobs: int = 0
    want_allowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The token that was drawn."""

    token_id: int
    logprob: float
    top_logprobs: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None


def draw(logits: torch.Tensor, asks: Sequence[Ask]) -> list[Draw]:
    """logits [rows, vocabulary], one ask a row. EngineError when logits are not finite."""
    temperatures = [1.0 if _is_greedy(ask.sampling) else ask.sampling.temperature for ask in asks]
    scale = torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits.float() / scale, dim=-1)
    allowed = {
        row: _truncate(logprobs[row], ask.sampling)
        for row, ask in enumerate(asks)
        if _is_truncated(ask.sampling)
    }
    chosen = _choose(logprobs, asks)
    chosen_logprobs = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    return [
        Draw(
            token_id=token_id,
            logprob=logprob,
            top_logprobs=_likeliest(logprobs[row], ask.top_logprobs),
            allowed=allowed[row].tolist() if ask.want_allowed and row in allowed else None,
        )
        for row, (ask, token_id, logprob) in enumerate(
            zip(asks, chosen.tolist(), chosen_logprobs, strict=True)
        )
    ]


def _choose(logprobs: torch.Tensor, asks: Sequence[Ask]) -> torch.Tensor:
    cumulative = logprobs.exp().cumsum(dim=-1)
    totals = cumulative[:, -1:]
    if not torch.isfinite(totals).all():
        raise EngineError("the model's logits are not finite numbers: its weights cannot be right")
    uniforms = [min(ask.uniform, _LARGEST_UNIFORM) for ask in asks]
    targets = torch.tensor(uniforms, device=logprobs.device)[:, None] * totals
    # `right`: the first index whose sum exceeds the target; its own share is never zero.
    drawn = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    greedy = torch.tensor([_is_greedy(ask.sampling) for ask in asks], device=logprobs.device)
    return torch.where(greedy, logprobs.argmax(dim=-1), drawn) if greedy.any() else drawn


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < _COLDEST


def _is_truncated(sampling: Sampling) -> bool:
    return not _is_greedy(sampling) and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _truncate(logprobs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Narrow one row [vocabulary] in place to top-k, then top-p; returns the ids left, sorted."""
    size = logprobs.numel()
    if sampling.top_k:
        guess = min(size, sampling.top_k)
        values, ids = logprobs.topk(guess)
        # The nucleus is taken of what top-k left, as others do.
        values = values - values.logsumexp(0)
    else:
        values, ids = logprobs.topk(min(size, _NUCLEUS_GUESS))
        if values.exp().sum() < sampling.top_p:
            values, ids = logprobs.sort(descending=True)
    # A token stays while the mass before it is below top_p: at least one always does.
    before = values.exp().cumsum(0) - values.exp()
    kept = ids[before < max(sampling.top_p, _SMALLEST_TOP_P)]
    values = logprobs[kept]
    logprobs.fill_(float("-inf"))
    logprobs[kept] = values - values.logsumexp(0)
    return kept.sort().values


def _likeliest(logprobs: torch.Tensor, count: int) -> dict[int, float]:
    """At most `count` of the ids that can be drawn."""
    if not count:
        return {}
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    likely = zip(ids.tolist(), values.tolist(), strict=True)
    return {token_id: logprob for token_id, logprob in likely if logprob > float("-inf")}
