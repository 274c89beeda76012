"""Our generation records <-> vLLM's token-in token-out route."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from deltawire.protocol.errors import EngineError, VersionNotServed
from deltawire.protocol.generation import (
    Completion,
    FinishReason,
    GenerateRequest,
    Sampling,
)
from deltawire.protocol.versions import PolicyVersion, VersionSpan

PIN_RETRY_S = 1.0
"""When a request that asks for a version not yet served should come again."""
_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def request_body(request: GenerateRequest, *, version: int, model: str) -> dict[str, Any]:
    """The body of POST /inference/v1/generate.

    The salt keeps prefixes apart that other weights computed: a cached prompt is only met again by
    requests that start at the same version.
    """
    return {
        "model": model,
        "token_ids": request.prompt_ids,
        "sampling_params": sampling_params(
            request.sampling, n=request.n, top_logprobs=request.top_logprobs
        ),
        "cache_salt": f"v{version}",
    }


def sampling_params(sampling: Sampling, *, n: int, top_logprobs: int = 0) -> dict[str, Any]:
    """vLLM's SamplingParams. `logprobs: 0` returns the sampled token's and no other."""
    params: dict[str, Any] = {
        "n": n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": top_logprobs,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        params["stop"] = sampling.stop
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params


def completion_of(choice: dict[str, Any], *, request: GenerateRequest, version: int) -> Completion:
    """One choice of the answer. `version` labels tokens where vLLM gives no spans.

    Raises:
        EngineError: vLLM answered something that is no completion.
    """
    token_ids = choice["token_ids"] or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(token_ids):
        raise EngineError(f"vLLM returned {len(token_ids)} tokens with {len(content)} logprobs")
    finish = _FINISHES.get(choice.get("finish_reason") or "")
    if finish is None:
        raise EngineError(f"vLLM ended a completion with {choice.get('finish_reason')!r}")
    return Completion(
        token_ids=token_ids,
        logprobs=[float(row["logprob"]) for row in content],
        finish_reason=finish,
        spans=spans_of_choice(choice, tokens=len(token_ids), version=version),
        sampling_mask=choice.get("sampling_mask") if request.want_sampling_mask else None,
        routed_experts=_routed(choice) if request.want_routed_experts else None,
        top_logprobs=[likeliest(row) for row in content] if request.top_logprobs else None,
    )


def likeliest(row: dict[str, Any]) -> dict[int, float]:
    """One token's candidates, id -> logprob."""
    return {int(c["token_id"]): float(c["logprob"]) for c in row.get("top_logprobs") or []}


def spans_of_choice(choice: dict[str, Any], *, tokens: int, version: int) -> list[VersionSpan]:
    """Version spans that cover every token. A label that is no number is not ours: refuse it."""
    spans = []
    for row in choice.get("weight_versions") or []:
        if not str(row["version"]).isdigit():
            raise EngineError(f"vLLM labelled tokens {row['version']!r}, expected a version")
        end = min(int(row["end"]), tokens)
        if end > row["start"]:
            spans.append(
                VersionSpan(
                    version=PolicyVersion(int(row["version"])), start=int(row["start"]), end=end
                )
            )
    if not spans and tokens:
        return [VersionSpan(version=PolicyVersion(version), start=0, end=tokens)]
    return spans


def require_pin(
    request: GenerateRequest, versions: Sequence[PolicyVersion], serving: PolicyVersion
) -> None:
    """Raises VersionNotServed where a request is pinned and some token is another version's: a swap
    came before it, or in the middle."""
    pin = request.policy_version
    if pin is not None and any(version != pin for version in versions):
        raise VersionNotServed(wanted=pin, serving=serving, retry_after_s=PIN_RETRY_S)


def score_body(token_ids: Sequence[int], *, model: str) -> dict[str, Any]:
    """The body of POST /v1/completions that returns the prompt's own logprobs."""
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def scores_of(answer: dict[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Logprob of each prompt token given those before it; the first is 0.0."""
    rows = answer["choices"][0].get("prompt_logprobs") or []
    if len(rows) != len(token_ids):
        raise EngineError(f"vLLM scored {len(rows)} of {len(token_ids)} tokens")
    return [
        0.0 if row is None else float(row[str(token_id)]["logprob"])
        for row, token_id in zip(rows, token_ids, strict=True)
    ]


def _routed(choice: dict[str, Any]) -> list[list[list[int]]] | None:
    """[token][layer][top_k] expert ids, decoded from vLLM's base64 .npy; no pickles."""
    packed = choice.get("routed_experts")
    if packed is None:
        return None
    array = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
    routed: list[list[list[int]]] = array.tolist()
    return routed
