"""Losses with one importance ratio per sequence.

Each token of a sequence carries the sequence's loss, so that the mean over its tokens is the
sequence's loss again; token weights of a correction act through their mean.
"""

from deltawire_trainer.losses.terms import LossInput, TokenLoss, clipped_surrogate
from deltawire_trainer.ragged import per_sample_mean, per_sample_sum


def geometric_ratio(batch: LossInput) -> TokenLoss:
    """The clipped surrogate of the geometric mean ratio: GSPO, arXiv 2507.18071."""
    log_ratio = batch.policy_logprobs - batch.old_logprobs
    mean = per_sample_mean(log_ratio, batch.sample_index, batch.samples)
    return clipped_surrogate(mean.exp()[batch.sample_index], batch)


def product_ratio(batch: LossInput) -> TokenLoss:
    """The clipped surrogate of the whole completion's ratio: RLOO, arXiv 2402.14740, where a
    completion is one action."""
    log_ratio = batch.policy_logprobs - batch.old_logprobs
    total = per_sample_sum(log_ratio, batch.sample_index, batch.samples)
    return clipped_surrogate(total.exp()[batch.sample_index], batch)
