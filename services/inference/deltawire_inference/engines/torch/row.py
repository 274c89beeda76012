"""One completion under way.

Life: waiting (no cache row) -> running (a cache row; `cached` tokens of it hold KV) -> finished. A
swap in mode `keep` sends a running row back to waiting with everything it has sampled.
"""

import random
import secrets
from dataclasses import dataclass, field

from deltawire.protocol.generation import FinishReason, GenerateRequest
from deltawire_inference.engines.torch.adapters import Adapter
from deltawire_inference.engines.torch.sampler import Ask, Draw
from deltawire_inference.engines.torch.stops import StopRule


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """State of one of a request's `n` completions."""

    request: GenerateRequest
    index: int
    stops: StopRule
    dice: random.Random
    """The request's own: what it draws does not depend on who else runs."""
    token_ids: list[int]
    """Prompt, then what was sampled."""
    adapter: Adapter | None = None
    slot: int | None = None
    cached: int = 0
    """Leading tokens whose KV is in the cache row."""
    kv_versions: set[int] = field(default_factory=set)
    """Versions that computed the KV; more than one in mode keep_kv only."""
    prompt_kept: bool = False
    """Its prompt was offered to the prefix cache."""
    finish_reason: FinishReason | None = None
    draws: list[Draw] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens without KV: the next step computes them."""
        return len(self.token_ids) - self.cached

    def ask(self) -> Ask:
        """How the next token is drawn. Uses up one number of the dice."""
        return Ask(
            sampling=self.request.sampling,
            uniform=self.dice.random(),
            top_logprobs=self.request.top_logprobs,
            want_allowed=self.request.want_sampling_mask,
        )

    def append(self, drawn: Draw, *, version: int) -> None:
        """Take a drawn token, and see whether the completion ends with it."""
        self.draws.append(drawn)
        self.versions.append(version)
        self.token_ids.append(drawn.token_id)
        sampled = self.token_ids[len(self.request.prompt_ids) :]
        self.finish_reason = self.stops.reason(sampled)

    def leave_cache(self) -> None:
        """Back to waiting: KV is computed again from the tokens."""
        self.slot, self.cached = None, 0
        self.kv_versions.clear()


def dice_of(request: GenerateRequest, index: int) -> random.Random:
    """Seeded by (seed, index of the completion), or by the system."""
    seed = request.sampling.seed
    return random.Random(secrets.token_hex(16) if seed is None else f"{seed}:{index}")
