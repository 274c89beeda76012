"""Losses with one importance ratio per token."""

from deltawire_trainer.losses.terms import LossInput, TokenLoss, clipped_surrogate


def token_clipped(batch: LossInput) -> TokenLoss:
    """The clipped surrogate of each token's own ratio: GRPO (arXiv 2402.03300), Dr. GRPO
    (2503.20783), DAPO (2503.14476) and REINFORCE++ (2501.03262) differ in baseline, clip range
    and reduction only."""
    return clipped_surrogate((batch.policy_logprobs - batch.old_logprobs).exp(), batch)


def clipped_weight(batch: LossInput) -> TokenLoss:
    """-sg(min(ratio, 1 + clip_high)) * A * logprob: CISPO, MiniMax-M1, arXiv 2506.13585. No token
    loses its gradient; only its weight is bounded."""
    ratio = (batch.policy_logprobs - batch.old_logprobs).exp().detach()
    high = ratio > 1.0 + batch.clip_high
    weight = ratio.clamp(max=1.0 + batch.clip_high)
    return TokenLoss(
        values=-weight * batch.advantages * batch.policy_logprobs,
        clipped_low=high.new_zeros(high.shape),
        clipped_high=high & (batch.advantages > 0),
    )
