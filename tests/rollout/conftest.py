"""Tiny chat tokenizers with real template shapes, a scripted policy, and OpenEnv servers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import tokenizers
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from tokenizers import decoders, models, pre_tokenizers, trainers

from deltawire.protocol.generation import Completion, GenerateRequest, GenerateResponse
from deltawire.protocol.rollouts import Task, Ticket
from deltawire.protocol.versions import spans_of
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.tokenizer import ChatTokenizer
from deltawire.service.serve import bind

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] +"
    " '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""No special token anywhere: every boundary may merge."""
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
"""Rewrites history: what was thought before is not shown again."""
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turns') }}"
    "{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
"""Insists on taking turns, and has no mark that opens the assistant's."""
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "</s>",
]  # fmt: skip
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "plain": (PLAIN, "</s>"),
    "forgetful": (FORGETFUL, "<|im_end|>"),
    "strict": (STRICT, "</s>"),
}
"""With the end-of-sequence token."""


@pytest.fixture(scope="session")
def tiny_bpe() -> tokenizers.Tokenizer:
    """Byte-level BPE with many merges, so that text and ids do not map one to one."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [CHATML, LLAMA3, PLAIN, "user: assistant: system: hello there the crane guess is\n\n"]
    tokenizer.train_from_iterator(
        corpus * 4,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


@pytest.fixture(scope="session")
def chat_tokenizer(tiny_bpe: tokenizers.Tokenizer) -> Callable[[str], ChatTokenizer]:
    def make(name: str) -> ChatTokenizer:
        template, eos = TEMPLATES[name]
        special = {"bos_token": "<|begin_of_text|>", "eos_token": eos}
        return ChatTokenizer(tiny_bpe, template=template, special=special)

    return make


@pytest.fixture
def renderer(chat_tokenizer: Callable[[str], ChatTokenizer]) -> Renderer:
    return Renderer(chat_tokenizer("chatml"))


class ScriptedPolicy:
    """Says the next line of its script in every completion, and keeps what it was asked."""

    def __init__(self, renderer: Renderer, lines: Sequence[str] = ("guess",)) -> None:
        self.requests: list[GenerateRequest] = []
        self.version = 1
        self._renderer, self._lines = renderer, list(lines)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        self.requests.append(request)
        line = self._lines[min(len(self.requests), len(self._lines)) - 1]
        await asyncio.sleep(0)
        tokenizer = self._renderer._tokenizer
        ids = [*tokenizer.encode(line, add_special_tokens=False), self._renderer.stop_token_ids[0]]
        return GenerateResponse(
            completions=[completion(ids, version=self.version) for _ in range(request.n)],
            replica_id="r1",
        )


def completion(ids: Sequence[int], *, version: int = 1, finish: str = "stop") -> Completion:
    return Completion.model_validate(
        {
            "token_ids": list(ids),
            "logprobs": [-0.5] * len(ids),
            "finish_reason": finish,
            "spans": [span.model_dump() for span in spans_of([version] * len(ids))],
        }
    )


class OpenEnvServer:
    """The OpenEnv WebSocket protocol over a function; its faults can be switched on."""

    def __init__(self, *, turns: int = 2, max_sessions: int = 64) -> None:
        self.turns = turns
        self.max_sessions = max_sessions
        self.active = 0
        self.most_active = 0
        self.resets: list[dict[str, object]] = []
        self.said: list[str] = []
        self.sleeping_for = 0
        """Handshakes still answered with 503 and a page."""
        self.hang_on = ""
        self.fail_on = ""
        self.cut_on = ""
        self.info: dict[str, object] = {}
        self.url = ""
        self.app = FastAPI()
        self.app.websocket("/ws")(self._serve)

    async def _serve(self, socket: WebSocket) -> None:
        if self.sleeping_for > 0:
            self.sleeping_for -= 1
            await socket.close(1013)
            return
        await socket.accept()
        if self.active >= self.max_sessions:
            error = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 1}
            await socket.send_json({"type": "error", "data": error})
            await socket.close(1013)
            return
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            await self._converse(socket)
        except WebSocketDisconnect:
            pass
        finally:
            self.active -= 1

    async def _converse(self, socket: WebSocket) -> None:
        turn = 0
        while True:
            frame = await socket.receive_json()
            if frame["type"] == "close":
                return
            if frame["type"] == "reset":
                self.resets.append(frame["data"])
                chat = [
                    {"role": "system", "content": "guess a word"},
                    {"role": "user", "content": f"game {frame['data']['seed']}"},
                ]
                await self._answer(socket, chat, reward=None, done=False)
                continue
            text = frame["data"]["message"]
            self.said.append(text)
            turn += 1
            if self.hang_on and self.hang_on in text:
                await asyncio.sleep(60)
            if self.cut_on and self.cut_on in text:
                await socket.close(1011)
                return
            if self.fail_on and self.fail_on in text:
                error = {"message": "the world broke", "code": "EXECUTION_ERROR"}
                await socket.send_json({"type": "error", "data": error})
                continue
            chat = [{"role": "user", "content": f"turn {turn}"}]
            await self._answer(socket, chat, reward=0.5, done=turn >= self.turns)

    async def _answer(
        self, socket: WebSocket, chat: list[dict[str, str]], *, reward: float | None, done: bool
    ) -> None:
        observation = {"chat": chat, "metrics": {"solved": float(done)}, "info": self.info}
        data = {"observation": observation, "reward": reward, "done": done}
        await socket.send_json({"type": "observation", "data": data})


@contextlib.asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """The app on a free port, by its http URL."""
    config = uvicorn.Config(
        app, log_config=None, ws="websockets-sansio", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    listener = bind("127.0.0.1", 0)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture
async def serve_openenv() -> AsyncIterator[Callable[..., object]]:
    """`server = await serve_openenv(turns=2)`: a fake that speaks the real protocol."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(**options: int) -> OpenEnvServer:
            server = OpenEnvServer(**options)
            server.url = await stack.enter_async_context(served(server.app))
            return server

        yield serve


@pytest.fixture
def serve_app() -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[str]]:
    return served


@pytest.fixture
def scripted_policy() -> type[ScriptedPolicy]:
    return ScriptedPolicy


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    return completion


@pytest.fixture
def make_ticket() -> Callable[..., Ticket]:
    def make(ticket_id: str = "t-1", **changes: object) -> Ticket:
        fields = {
            "task": Task(seed=7),
            "group_size": 2,
            "max_turns": 4,
            "max_tokens": 2000,
            "deadline_s": 20.0,
            **changes,
        }
        return Ticket.model_validate({"ticket_id": ticket_id, **fields})

    return make


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)
