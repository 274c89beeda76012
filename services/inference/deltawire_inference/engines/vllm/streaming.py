"""vLLM's event stream -> our tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deltawire.protocol.errors import EngineError
from deltawire.protocol.generation import FinishReason
from deltawire.protocol.versions import PolicyVersion
from deltawire_inference.engines.base import SampledToken
from deltawire_inference.engines.vllm.requests import likeliest

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def tokens_of_event(event: dict[str, Any], *, version: PolicyVersion) -> Iterator[SampledToken]:
    """The tokens of one event; the finish reason stands on a completion's last one.

    Raises:
        EngineError: The event is an error.
    """
    if "error" in event:
        raise EngineError(f"vLLM ended a stream: {event['error']}")
    for choice in event.get("choices", []):
        finish = _FINISHES.get(choice.get("finish_reason") or "")
        token_ids = choice.get("token_ids") or []
        content = (choice.get("logprobs") or {}).get("content") or [{}] * len(token_ids)
        allowed = choice.get("sampling_mask") or [None] * len(token_ids)
        for i, token_id in enumerate(token_ids):
            yield SampledToken(
                index=choice["index"],
                token_id=token_id,
                logprob=float(content[i].get("logprob", 0.0)),
                version=version,
                top_logprobs=likeliest(content[i]),
                allowed=allowed[i],
                finish_reason=finish if i == len(token_ids) - 1 else None,
            )
        if finish is not None and not token_ids:
            yield SampledToken(
                index=choice["index"], token_id=None, version=version, finish_reason=finish
            )
