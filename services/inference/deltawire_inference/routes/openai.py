"""OpenAI-compatible routes: chat and text completions, and the list of models."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from deltawire.protocol.errors import MalformedMessage, ObjectMissing
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.together import together
from deltawire.rollout.tokenizer import ChatTokenizer
from deltawire_inference.admission import Admission
from deltawire_inference.openai_api.answers import Model, ModelList
from deltawire_inference.openai_api.kinds import ChatKind, TextKind
from deltawire_inference.openai_api.requests import ChatRequest, CompletionRequest
from deltawire_inference.openai_api.writer import Writer
from deltawire_inference.replica import Replica
from deltawire_inference.routes.disconnect import while_connected
from deltawire_inference.text import ReplicaText

_ALL_THAT_FITS = 1_000_000
"""New tokens asked for when the client sets no limit: the engine ends at the context's."""


def openai_routes(replica: Replica, text: ReplicaText, admission: Admission) -> APIRouter:
    """`/v1/chat/completions`, `/v1/completions`, `/v1/models`."""
    router = APIRouter(prefix="/v1", tags=["openai"])
    desk = OpenAIDesk(replica, text)

    @router.post("/chat/completions", response_model=None)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        """A conversation goes on."""
        admission.check()
        return await desk.answer(request, await desk.chat_writer(asked))

    @router.post("/completions", response_model=None)
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        """A text, or token ids, go on."""
        admission.check()
        return await desk.answer(request, await desk.text_writer(asked))

    @router.get("/models")
    async def models() -> ModelList:
        """What is served: the run's policy, under the base model's name and the run's."""
        return await desk.models()

    return router


class OpenAIDesk:
    """Turns requests into the engine's, and its answers into OpenAI's."""

    def __init__(self, replica: Replica, text: ReplicaText) -> None:
        self._replica, self._text = replica, text

    async def chat_writer(self, asked: ChatRequest) -> Writer:
        """Render the conversation."""
        tokenizer = await self._tokenizer_for(asked.model)
        messages = [{"role": message.role, "content": message.text} for message in asked.messages]
        request = asked.to_engine(
            Renderer(tokenizer).prompt(messages),
            max_new=asked.new_tokens or _ALL_THAT_FITS,
            top_logprobs=asked.top_logprobs,
        )
        kind = ChatKind(tokenizer, logprobs=asked.logprobs)
        return Writer(
            asked=asked,
            requests=[request],
            kind=kind,
            tokenizer=tokenizer,
            run_id=self._replica.follower.run_id,
            id=f"chatcmpl-{uuid.uuid4().hex[:24]}",
        )

    async def text_writer(self, asked: CompletionRequest) -> Writer:
        """Encode the prompts that are text."""
        if asked.echo:
            raise MalformedMessage("echo is not offered; the prompt is in your hands")
        if asked.stream and len(asked.prompts) > 1:
            raise MalformedMessage("stream one prompt a request")
        tokenizer = await self._tokenizer_for(asked.model)
        requests = [
            asked.to_engine(
                prompt
                if isinstance(prompt, list)
                else tokenizer.encode(prompt, add_special_tokens=True),
                max_new=asked.new_tokens,
                top_logprobs=asked.logprobs or 0,
            )
            for prompt in asked.prompts
        ]
        return Writer(
            asked=asked,
            requests=requests,
            kind=TextKind(tokenizer, logprobs=asked.logprobs),
            tokenizer=tokenizer,
            run_id=self._replica.follower.run_id,
            id=f"cmpl-{uuid.uuid4().hex[:24]}",
        )

    async def answer(self, request: Request, writer: Writer) -> Response:
        """Whole, or as a stream. The first token decides: an error before it is a status."""
        if not writer.asked.stream:
            work = together(*(self._replica.generate(r) for r in writer.requests))
            answers = await while_connected(request, work)
            whole = writer.whole([answer.completions for answer in answers])
            return Response(whole.to_json(), media_type="application/json")
        events = self._events(writer)
        first = await anext(events)
        return StreamingResponse(_after(first, events), media_type="text/event-stream")

    async def models(self) -> ModelList:
        """See the route."""
        manifest = await asyncio.to_thread(self._replica.follower.manifest)
        names = dict.fromkeys([manifest.base_model, manifest.run_id])
        return ModelList(
            data=[
                Model(
                    id=name,
                    created=int(manifest.created_at),
                    root=manifest.base_model,
                    policy_version=self._replica.engine.version,
                )
                for name in names
                if name
            ]
        )

    async def _tokenizer_for(self, model: str) -> ChatTokenizer:
        served = [entry.id for entry in (await self.models()).data]
        if model not in served:
            raise ObjectMissing(f"model {model!r} is not served here; {', '.join(served)} is")
        return await self._text.tokenizer()

    async def _events(self, writer: Writer) -> AsyncGenerator[str, None]:
        async with (
            aclosing(self._replica.stream(writer.requests[0])) as tokens,
            aclosing(writer.events(tokens)) as events,
        ):
            async for event in events:
                yield event


async def _after(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
