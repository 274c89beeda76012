"""Token ids in, token ids with logprobs and version spans out: /v1/generate and the engine seam."""

from typing import Literal, Self

from pydantic import Field, model_validator

from deltawire.protocol.versions import PolicyVersion, VersionSpan
from deltawire.protocol.wire_model import WireModel

FinishReason = Literal["stop", "length", "abort"]


MOST_COMPLETIONS = 256
"""Of one request."""


class Sampling(WireModel):
    """How tokens are drawn. Behaviour logprobs are those of the distribution sampled from."""

    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 is off."""
    max_new_tokens: int = Field(64, ge=1)
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    """Beside the model's end-of-sequence ids. The stopping token is part of the completion."""
    ignore_eos: bool = False
    seed: int | None = None


class GenerateRequest(WireModel):
    """One prompt, `n` completions. Prompt ids are shared, so the prefix is computed once."""

    prompt_ids: list[int] = Field(min_length=1)
    n: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    sampling: Sampling = Sampling()
    policy_version: PolicyVersion | None = None
    """Pin: answer 409 when this version is not the one served."""
    min_version: PolicyVersion | None = None
    """Answer 409 with Retry-After when the replica is older than this."""
    want_sampling_mask: bool = False
    want_routed_experts: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    """How many of the likeliest ids to return beside each token."""
    session: str = ""
    """Affinity key: turns of one episode carry the same one."""
    adapter: str | None = None


class Completion(WireModel):
    """Tokens sampled in one generation.

    Example: ``Completion(token_ids=[91, 7, 2], logprobs=[-.1, -2., -.3], finish_reason="stop",
    spans=[VersionSpan(version=4, start=0, end=3)])``.
    """

    token_ids: list[int]
    logprobs: list[float]
    """[len(token_ids)] log-probabilities of the sampled tokens under the behaviour policy."""
    finish_reason: FinishReason
    spans: list[VersionSpan]
    sampling_mask: list[list[int]] | None = None
    """Per token the ids that could have been sampled (top-p/top-k), when asked for and offered."""
    routed_experts: list[list[list[int]]] | None = None
    """[token][layer][top_k] expert ids, when asked for and offered."""
    top_logprobs: list[dict[int, float]] | None = None
    """Per token the likeliest ids with their logprobs, when asked for."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs")
        covered = self.spans[-1].end if self.spans else 0
        if covered != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but spans cover {covered}")
        return self


class GenerateResponse(WireModel):
    """The completions of one request, and who made them."""

    completions: list[Completion]
    replica_id: str = ""
    adapter: str | None = None
    """The adapter that answered, with its version, for LoRA runs."""
