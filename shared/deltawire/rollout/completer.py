"""Whole completions from a policy that may be updated, aborted or too old in the middle."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from deltawire.protocol.errors import EngineError, VersionNotServed
from deltawire.protocol.generation import Completion, GenerateRequest, GenerateResponse
from deltawire.protocol.versions import VersionSpan
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.policy import PolicyClient
from deltawire.rollout.together import together
from deltawire.rollout.waits import Waits

T = TypeVar("T")

_EMPTY_ABORTS_ALLOWED = 100
"""Aborts in a row that brought no token, before the policy counts as unable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Completions of one request, none of them aborted, and who made them."""

    completions: list[Completion]
    replica_id: str


class Completer:
    """Waits for versions and continues what was cut off. Raises EngineError and TimeoutError."""

    def __init__(self, policy: PolicyClient, *, waits: Waits) -> None:
        self._policy = policy
        self._waits = waits

    async def complete(self, request: GenerateRequest, *, deadline: Deadline) -> Sampled:
        """`request.n` whole completions. TimeoutError when the deadline passes first."""
        async with asyncio.timeout(deadline.left_s):
            response = await self._generate(request)
            whole = await together(
                *(self._continued(request, completion) for completion in response.completions)
            )
        if len(whole) != request.n:
            raise EngineError(f"{request.n} completions were asked for, {len(whole)} came")
        return Sampled(completions=whole, replica_id=response.replica_id)

    async def _continued(self, request: GenerateRequest, completion: Completion) -> Completion:
        """Resubmit an aborted completion with its prefix until it ends by itself."""
        empty = 0
        while completion.finish_reason == "abort":
            left = request.sampling.max_new_tokens - len(completion.token_ids)
            if left <= 0:
                return completion.model_copy(update={"finish_reason": "length"})
            rest = request.model_copy(
                update={
                    "prompt_ids": request.prompt_ids + completion.token_ids,
                    "n": 1,
                    "sampling": request.sampling.model_copy(update={"max_new_tokens": left}),
                }
            )
            response = await self._generate(rest)
            more = response.completions[0]
            empty = 0 if more.token_ids else empty + 1
            if empty > _EMPTY_ABORTS_ALLOWED:
                raise EngineError("the policy aborts every request before its first token")
            completion = joined(completion, more)
        return completion

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        while True:
            try:
                with self._waits.on("engine"):
                    return await self._policy.generate(request)
            except VersionNotServed as error:
                if _has_passed(error):
                    raise
                with self._waits.on("weights"):
                    await asyncio.sleep(error.retry_after_s)


def _has_passed(error: VersionNotServed) -> bool:
    """A version older than the one served never comes back."""
    return error.serving is not None and 0 <= error.wanted < error.serving


def joined(first: Completion, rest: Completion) -> Completion:
    """Two parts of one completion, with spans and per-token facts in step.

    Example: 5 tokens of version 7 and 7 tokens of version 8 have the spans [7: 0..5, 8: 5..12].
    """
    offset = len(first.token_ids)
    moved = [
        VersionSpan(version=span.version, start=span.start + offset, end=span.end + offset)
        for span in rest.spans
    ]
    return Completion(
        token_ids=first.token_ids + rest.token_ids,
        logprobs=first.logprobs + rest.logprobs,
        finish_reason=rest.finish_reason,
        spans=_merged(first.spans + moved),
        sampling_mask=_both(first.sampling_mask, rest.sampling_mask),
        routed_experts=_both(first.routed_experts, rest.routed_experts),
    )


def _merged(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            span = VersionSpan(version=span.version, start=merged.pop().start, end=span.end)
        merged.append(span)
    return merged


def _both(first: list[T] | None, rest: list[T] | None) -> list[T] | None:
    return None if first is None or rest is None else first + rest
