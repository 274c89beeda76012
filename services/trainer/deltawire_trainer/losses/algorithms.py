"""The algorithms by name: which loss, which reduction, and whether silent groups are replaced.

Their baselines are in advantages.py; the clip range is the job's.
"""

from dataclasses import dataclass

from deltawire_trainer.losses.clipped import clipped_weight, token_clipped
from deltawire_trainer.losses.reduction import Reduction, per_sequence, per_slot, per_token
from deltawire_trainer.losses.sequence import geometric_ratio, product_ratio
from deltawire_trainer.losses.terms import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One policy-gradient algorithm."""

    loss: Loss
    reduce: Reduction
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal do not count towards a batch (DAPO)."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(loss=token_clipped, reduce=per_sequence),
    "dr_grpo": Algorithm(loss=token_clipped, reduce=per_slot),
    "dapo": Algorithm(loss=token_clipped, reduce=per_token, dynamic_sampling=True),
    "reinforce_pp": Algorithm(loss=token_clipped, reduce=per_token),
    "cispo": Algorithm(loss=clipped_weight, reduce=per_token),
    "gspo": Algorithm(loss=geometric_ratio, reduce=per_sequence),
    "rloo": Algorithm(loss=product_ratio, reduce=per_sequence),
}
