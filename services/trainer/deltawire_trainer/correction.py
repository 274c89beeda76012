"""Off-policy correction: what the surrogate's ratio is taken against, and what each token weighs.

Three policies may differ: the target policy being updated, the behaviour policy that sampled, and
a proximal policy around which the surrogate clips. One batch is one optimizer step here, so the
proximal policy is the target policy before the step, its logprobs the detached ones. Each rule is
a pure function of [T] log ratios (policy - behaviour, detached) and returns [T] weights; a weight
of 0 leaves the token out.

Which ratio the algorithm clips:
* `none` treats the data as on-policy: ratio 1, weight 1. No correction at all.
* `clip`, `geometric_mask`, `opsm`: the ratio against the behaviour policy; the algorithm's own clip
  bounds it (PPO, arXiv 1707.06347), the masks only leave out.
* the others: the ratio against the proximal policy, weighed by policy / behaviour.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deltawire_trainer.ragged import per_sample_mean, per_sample_sum

OPSM_KL = 0.1
"""Mean log ratio per token above which a sequence with a negative advantage is left out."""

_LOG_RATIO_LIMIT = 20.0
"""exp of more than this is as good as infinite; keeps inf * 0 out of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a rule looks at. T tokens of S samples."""

    log_ratio: torch.Tensor
    """[T] policy - behaviour logprobs, detached."""
    advantages: torch.Tensor
    """[T]"""
    sample_index: torch.Tensor
    """[T] int64, non-decreasing."""
    samples: int
    cap: float
    """Largest ratio believed; its inverse is the smallest where a rule is two-sided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A rule's verdict on a micro-batch."""

    old_logprobs: torch.Tensor
    """[T] what the surrogate's ratio is taken against."""
    weights: torch.Tensor
    """[T] what each token's loss is multiplied by; 0 leaves it out."""


def uncorrected(tokens: Tokens) -> torch.Tensor:
    """Every token weighs 1."""
    return torch.ones_like(tokens.log_ratio)


def token_truncate(tokens: Tokens) -> torch.Tensor:
    """min(ratio, cap) per token: truncated importance sampling; IMPALA, arXiv 1802.01561."""
    return _exp(tokens.log_ratio).clamp(max=tokens.cap)


def token_mask(tokens: Tokens) -> torch.Tensor:
    """The ratio where 1/cap <= ratio <= cap, else 0: IcePop, Ring-1T, arXiv 2510.18855."""
    ratio = _exp(tokens.log_ratio)
    return ratio * _inside(ratio, tokens.cap)


def sequence_truncate(tokens: Tokens) -> torch.Tensor:
    """min(product of ratios, cap) for all tokens of a sequence: unbiased sequence-level
    importance sampling, truncated (Ionides 2008, J. Comput. Graph. Stat. 17)."""
    return _sequence_ratio(tokens).clamp(max=tokens.cap)[tokens.sample_index]


def sequence_mask(tokens: Tokens) -> torch.Tensor:
    """The product of ratios where it is at most cap, else the sequence is left out: masked
    importance sampling (Liu, Li et al. 2025, "When Speed Kills Stability")."""
    ratio = _sequence_ratio(tokens)
    return (ratio * (ratio <= tokens.cap))[tokens.sample_index]


def geometric_mask(tokens: Tokens) -> torch.Tensor:
    """1 where the geometric mean ratio of the sequence lies in [1/cap, cap], else 0. The
    length-free ratio is that of GSPO, arXiv 2507.18071."""
    mean = per_sample_mean(tokens.log_ratio, tokens.sample_index, tokens.samples)
    return _inside(_exp(mean), tokens.cap)[tokens.sample_index]


def opsm(tokens: Tokens) -> torch.Tensor:
    """0 for sequences with a negative advantage that the policy has moved away from (mean
    behaviour - policy logprob above OPSM_KL), else 1: DeepSeek-V3.2, arXiv 2512.02556."""
    drift = per_sample_mean(-tokens.log_ratio, tokens.sample_index, tokens.samples)
    hopeless = (drift > OPSM_KL)[tokens.sample_index] & (tokens.advantages < 0)
    return (~hopeless).to(tokens.log_ratio.dtype)


def decoupled(tokens: Tokens) -> torch.Tensor:
    """proximal / behaviour where it is at most cap, else 0: the decoupled objective of AReaL,
    arXiv 2505.24298 (after Hilton et al., arXiv 2110.00641)."""
    ratio = _exp(tokens.log_ratio)
    return ratio * (ratio <= tokens.cap)


RULES: dict[str, Callable[[Tokens], torch.Tensor]] = {
    "none": uncorrected,
    "clip": uncorrected,
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
    "opsm": opsm,
    "decoupled": decoupled,
}

_AGAINST_BEHAVIOUR = frozenset({"clip", "geometric_mask", "opsm"})
"""Rules whose surrogate takes its ratio against the behaviour policy."""


def correct(
    rule: str,
    *,
    policy_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sample_index: torch.Tensor,
    samples: int,
    cap: float,
) -> Correction:
    """Apply a rule by name to [T] tokens of a micro-batch."""
    proximal = policy_logprobs.detach()
    tokens = Tokens(
        log_ratio=proximal - behaviour_logprobs,
        advantages=advantages,
        sample_index=sample_index,
        samples=samples,
        cap=cap,
    )
    old = behaviour_logprobs if rule in _AGAINST_BEHAVIOUR else proximal
    return Correction(old_logprobs=old, weights=RULES[rule](tokens))


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def _sequence_ratio(tokens: Tokens) -> torch.Tensor:
    """[S] product of the token ratios of each sequence."""
    return _exp(per_sample_sum(tokens.log_ratio, tokens.sample_index, tokens.samples))


def _inside(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    return ((ratio >= 1.0 / cap) & (ratio <= cap)).to(ratio.dtype)
