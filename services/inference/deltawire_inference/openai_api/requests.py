"""What OpenAI clients send, and what of it reaches the engine. Unknown fields are ignored."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltawire.protocol.errors import MalformedMessage
from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire.protocol.versions import PolicyVersion

_DEFAULT_TOKENS = 16
"""Of /v1/completions, as OpenAI has it; a chat may fill its context."""


class TextPart(BaseModel):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class SamplingFields(BaseModel):
    """What both kinds of request share. The last block is ours, as in other RL servers."""

    model_config = ConfigDict(extra="ignore")

    model: str
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    return_token_ids: bool = False
    policy_version: PolicyVersion | None = None
    min_version: PolicyVersion | None = None
    session: str = ""

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def to_engine(
        self, prompt_ids: list[int], *, max_new: int, top_logprobs: int
    ) -> GenerateRequest:
        """The engine's request. MalformedMessage for values it cannot mean."""
        if not prompt_ids:
            raise MalformedMessage("the prompt is empty")
        return GenerateRequest(
            prompt_ids=prompt_ids,
            n=self.n,
            sampling=Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(0, self.top_k),
                max_new_tokens=max_new,
                stop=self.stops,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                seed=self.seed,
            ),
            policy_version=self.policy_version,
            min_version=self.min_version,
            session=self.session,
            top_logprobs=top_logprobs,
        )


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def new_tokens(self) -> int | None:
        """The limit asked for; None for all that fit."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. The prompt is a text or token ids, or a list of one of those."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def new_tokens(self) -> int:
        """The limit asked for."""
        return self.max_tokens or _DEFAULT_TOKENS

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_] as ids:
                return [[token_id for token_id in ids if isinstance(token_id, int)]]
            case several:
                return [prompt for prompt in several if not isinstance(prompt, int)]
