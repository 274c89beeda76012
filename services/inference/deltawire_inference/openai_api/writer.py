"""Engine answers -> OpenAI answers, whole or as the events of a stream."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from deltawire.protocol.generation import Completion, GenerateRequest
from deltawire.protocol.versions import PolicyVersion, spans_of
from deltawire.rollout.tokenizer import ChatTokenizer
from deltawire_inference.engines.base import SampledToken
from deltawire_inference.openai_api.answers import Answer, Choice, Usage
from deltawire_inference.openai_api.kinds import Kind, ObjectWord
from deltawire_inference.openai_api.requests import SamplingFields
from deltawire_inference.text import Speech, spoken


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes the answers of one request."""

    asked: SamplingFields
    requests: Sequence[GenerateRequest]
    """One for each prompt."""
    kind: Kind
    tokenizer: ChatTokenizer
    run_id: str
    id: str

    def whole(self, completions: Sequence[Sequence[Completion]]) -> Answer:
        """The answer to all prompts; [prompt][n]."""
        n = self.asked.n
        choices = [
            self._choice(i * n + k, completion)
            for i, of_prompt in enumerate(completions)
            for k, completion in enumerate(of_prompt)
        ]
        sampled = sum(len(c.token_ids) for of_prompt in completions for c in of_prompt)
        versions = [s.version for of_prompt in completions for c in of_prompt for s in c.spans]
        answer = self._answer(self.kind.whole, choices, version=max(versions, default=None))
        answer.usage = self._usage(sampled)
        if self.asked.return_token_ids:
            answer.prompt_token_ids = self.requests[0].prompt_ids
        return answer

    async def events(self, tokens: AsyncIterator[SampledToken]) -> AsyncGenerator[str, None]:
        """Server-sent events of one prompt's completions, to `[DONE]`."""
        lines = [_Line(Speech(self.tokenizer, self.asked.stops)) for _ in range(self.asked.n)]
        async for token in tokens:
            choice = self._piece(lines[token.index], token)
            if choice is not None:
                yield _event(self._answer(self.kind.chunk, [choice], version=token.version))
        if self.asked.wants_usage:
            last = self._answer(self.kind.chunk, [], version=None)
            last.usage = self._usage(sum(len(line.versions) for line in lines))
            yield _event(last)
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, completion: Completion) -> Choice:
        text = spoken(self.tokenizer, completion.token_ids, self.asked.stops)
        choice = self.kind.choice(index, text, _tokens_of(completion))
        choice.finish_reason = completion.finish_reason
        choice.version_spans = completion.spans
        if self.asked.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    def _piece(self, line: "_Line", token: SampledToken) -> Choice | None:
        """The event of one token; None while its text and everything else is held back."""
        text = line.add(token)
        drawn = [token] if token.token_id is not None else []
        choice = self.kind.piece(token.index, text, drawn, at=line.said - len(text))
        if token.finish_reason is not None:
            choice.finish_reason = token.finish_reason
            choice.version_spans = spans_of(line.versions)
        if self.asked.return_token_ids:
            choice.token_ids = [t.token_id for t in drawn if t.token_id is not None]
        silent = not text and choice.logprobs is None and not choice.token_ids
        return None if silent and token.finish_reason is None else choice

    def _answer(
        self, word: ObjectWord, choices: list[Choice], *, version: PolicyVersion | None
    ) -> Answer:
        fingerprint = self.run_id if version is None else f"{self.run_id}@{version}"
        return Answer(
            id=self.id,
            object=word,
            model=self.asked.model,
            system_fingerprint=fingerprint,
            choices=choices,
        )

    def _usage(self, sampled: int) -> Usage:
        return Usage.of(sum(len(request.prompt_ids) for request in self.requests), sampled)


@dataclass(slots=True)
class _Line:
    """One choice of a stream as it grows."""

    speech: Speech
    versions: list[int] = field(default_factory=list)
    """Of each token."""
    said: int = 0
    """Characters so far."""

    def add(self, token: SampledToken) -> str:
        """The text that became certain."""
        text = ""
        if token.token_id is not None:
            self.versions.append(token.version)
            text = self.speech.add(token.token_id)
        if token.finish_reason is not None:
            text += self.speech.end()
        self.said += len(text)
        return text


def _tokens_of(completion: Completion) -> list[SampledToken]:
    top = completion.top_logprobs or [{} for _ in completion.token_ids]
    return [
        SampledToken(index=0, token_id=token_id, logprob=logprob, top_logprobs=likeliest)
        for token_id, logprob, likeliest in zip(
            completion.token_ids, completion.logprobs, top, strict=True
        )
    ]


def _event(answer: Answer) -> str:
    return f"data: {answer.to_json()}\n\n"
