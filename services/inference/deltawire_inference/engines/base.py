"""The engine seam: what generates inside a replica, and how weights enter it.

Engines: torch (in process), vllm (a supervised child). An engine never fetches anything. The
replica hands it a staged update; `apply` is the pause, and is all or nothing.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deltawire.protocol.chain import Link, RunManifest
from deltawire.protocol.chain import SwapMode as SwapMode
from deltawire.protocol.generation import FinishReason, GenerateRequest, GenerateResponse
from deltawire.protocol.versions import BASE_VERSION, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpdate:
    """An update that is ready to enter the weights: verified, decoded, old values gathered."""

    version: PolicyVersion
    base_version: PolicyVersion | None
    new_digest: str
    changed: int
    total: int
    token: object
    """The engine's own handle (patches in memory, a local file)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport:
    """What the swap cost. The pause is the time no token could be made."""

    pause_s: float
    mode: SwapMode
    digest: str
    recomputed_tokens: int = 0
    """Tokens of running requests whose KV is computed again (mode keep)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token as it was drawn, or the end of a completion that got no further token."""

    index: int
    """Which of the request's `n` completions."""
    token_id: int | None
    """None: the completion ended (abort) without one."""
    logprob: float = 0.0
    version: PolicyVersion = BASE_VERSION
    finish_reason: FinishReason | None = None
    """Set on the last token of a completion."""
    top_logprobs: Mapping[int, float] = field(default_factory=dict)
    """The likeliest ids, when asked for."""
    allowed: list[int] | None = None
    """Ids that could have been drawn, when asked for and fewer than all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy the engine is."""

    running: int
    waiting: int
    tokens_total: int
    tokens_per_s: float


class Engine(Protocol):
    """Raises only EngineError and WeightsError children, and MalformedMessage for a request that
    cannot be meant (ids outside the vocabulary, a prompt too long). One swap at a time."""

    name: str
    capabilities: frozenset[str]
    """Of: sampling_mask, routed_experts, adapters, score."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version whose weights are live; None before the first load."""
        ...

    @property
    def digest(self) -> str:
        """Running digest of the live weights."""
        ...

    async def start(
        self,
        model_dir: Path,
        objects: Sequence[tuple[Link, Path]],
        *,
        manifest: RunManifest,
        version: PolicyVersion,
    ) -> None:
        """Load configuration and tokenizer from `model_dir`, weights by a route from an anchor.

        May be called again to start over: a replica whose weights are not trusted re-bases so.
        """
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Sample. VersionNotServed for a pin that is not served."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[SampledToken, None]:
        """Sample, token by token, the completions of a request interleaved. Close it to stop."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token given those before it (first is 0.0), at the live version."""
        ...

    async def stage(self, objects: Sequence[tuple[Link, Path]]) -> StagedUpdate:
        """Decode and verify a route against the live weights while tokens flow."""
        ...

    async def apply(self, staged: StagedUpdate, *, mode: SwapMode) -> ApplyReport:
        """Swap between two forward passes. On error the old weights are live and unchanged."""
        ...

    async def verify(self) -> str:
        """Recompute the digest over all live weights."""
        ...

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a LoRA adapter under a versioned name."""
        ...

    async def pause(self) -> None:
        """Stop making tokens; requests wait."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    def load(self) -> EngineLoad:
        """How busy it is."""
        ...

    async def close(self) -> None:
        """Stop and free everything."""
        ...
