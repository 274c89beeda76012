"""The two kinds of answers: what differs between a chat choice and a text choice."""

from collections.abc import Sequence
from typing import Literal, Protocol

from deltawire.rollout.tokenizer import ChatTokenizer
from deltawire_inference.engines.base import SampledToken
from deltawire_inference.openai_api.answers import (
    AnswerMessage,
    ChatLogprobs,
    ChatTokenLogprob,
    Choice,
    CompletionLogprobs,
    TopLogprob,
)

ObjectWord = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Kind(Protocol):
    """How choices are written. `tokens` are those of the choice, or of a stream's piece of it."""

    whole: ObjectWord
    chunk: ObjectWord

    def choice(self, index: int, text: str, tokens: Sequence[SampledToken]) -> Choice:
        """A finished choice."""
        ...

    def piece(self, index: int, text: str, tokens: Sequence[SampledToken], *, at: int) -> Choice:
        """The next piece of a streamed choice; `at` is how many characters came before it."""
        ...


class ChatKind:
    """Messages, and logprobs as a list of tokens."""

    whole: ObjectWord = "chat.completion"
    chunk: ObjectWord = "chat.completion.chunk"

    def __init__(self, tokenizer: ChatTokenizer, *, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def choice(self, index: int, text: str, tokens: Sequence[SampledToken]) -> Choice:
        """See Kind."""
        message = AnswerMessage(role="assistant", content=text)
        return Choice(index=index, message=message, logprobs=self._of(tokens))

    def piece(self, index: int, text: str, tokens: Sequence[SampledToken], *, at: int) -> Choice:
        """See Kind. The first piece names the role."""
        delta = AnswerMessage(role="assistant" if at == 0 else None, content=text)
        return Choice(index=index, delta=delta, logprobs=self._of(tokens))

    def _of(self, tokens: Sequence[SampledToken]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs(content=[self._token(token) for token in tokens])

    def _token(self, token: SampledToken) -> ChatTokenLogprob:
        assert token.token_id is not None
        own = self._entry(token.token_id, token.logprob)
        top = [self._entry(i, logprob) for i, logprob in token.top_logprobs.items()]
        return ChatTokenLogprob(**own.model_dump(), top_logprobs=top)

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        text = _shown(token_id, self._tokenizer)
        return TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()))


class TextKind:
    """Plain text, and logprobs as lists in step."""

    whole: ObjectWord = "text_completion"
    chunk: ObjectWord = "text_completion"

    def __init__(self, tokenizer: ChatTokenizer, *, logprobs: int | None) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def choice(self, index: int, text: str, tokens: Sequence[SampledToken]) -> Choice:
        """See Kind."""
        return Choice(index=index, text=text, logprobs=self._of(tokens, at=0))

    def piece(self, index: int, text: str, tokens: Sequence[SampledToken], *, at: int) -> Choice:
        """See Kind."""
        return Choice(index=index, text=text, logprobs=self._of(tokens, at=at))

    def _of(self, tokens: Sequence[SampledToken], *, at: int) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        found = CompletionLogprobs(top_logprobs=[] if self._logprobs else None)
        for token in tokens:
            assert token.token_id is not None
            text = _shown(token.token_id, self._tokenizer)
            found.tokens.append(text)
            found.token_logprobs.append(token.logprob)
            found.text_offset.append(at)
            at += len(text)
            if found.top_logprobs is not None:
                top = token.top_logprobs.items()
                found.top_logprobs.append({_shown(i, self._tokenizer): p for i, p in top})
        return found


def _shown(token_id: int, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
