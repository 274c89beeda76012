"""What OpenAI clients get. Fields of ours stand beside theirs: token ids and policy versions."""

import time
from typing import Literal

from pydantic import BaseModel, Field

from deltawire.protocol.versions import VersionSpan

FinishWord = Literal["stop", "length", "abort"]


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that was drawn."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogprobs(BaseModel):
    """Of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Of a text choice; lists in step."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float] = Field(default_factory=list)
    top_logprobs: list[dict[str, float]] | None = None
    text_offset: list[int] = Field(default_factory=list)


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> "Usage":
        """Both, and their sum."""
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
        )


class AnswerMessage(BaseModel):
    """What the policy said, or the next piece of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class Choice(BaseModel):
    """One completion, or a piece of it. Chat answers fill message or delta, others text."""

    index: int
    finish_reason: FinishWord | None = None
    message: AnswerMessage | None = None
    delta: AnswerMessage | None = None
    text: str | None = None
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    """Ours, when asked for: ids as sampled."""
    version_spans: list[VersionSpan] | None = None
    """Ours: which policy version made which tokens."""


class Answer(BaseModel):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    system_fingerprint: str
    """Run and policy version that answered."""
    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """Ours, when asked for."""

    def to_json(self) -> str:
        """Without the fields that do not apply."""
        return self.model_dump_json(exclude_none=True)


class Model(BaseModel):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["deltawire"] = "deltawire"
    root: str
    max_model_len: int | None = None
    policy_version: int | None = None


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
