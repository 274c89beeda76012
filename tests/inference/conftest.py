"""A tiny run: a random Llama and tokenizer made here, published to a folder as a bucket."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from bench.learning.tiny_model import byte_tokenizer
from fastapi import FastAPI
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from deltawire.codec.patch import Layout
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.options import ANCHOR_SHARD_BYTES
from deltawire.sync.publisher import Published, Publisher
from deltawire_inference.app import Inference, build_app
from deltawire_inference.engines.base import ApplyReport, StagedUpdate, SwapMode
from deltawire_inference.engines.torch.core import Limits
from deltawire_inference.engines.torch.engine import TorchEngine
from deltawire_inference.replica import Replica
from deltawire_inference.settings import InferenceSettings


@dataclass(kw_only=True)
class TinyRun:
    """The trainer's side: weights that move, and versions published from them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    publisher: Publisher
    store: LocalStore
    folder: Path
    followers: int = 0

    @property
    def run_id(self) -> str:
        return self.publisher.run_id

    def move(self, *, scale: float = 0.5, share: float = 0.3) -> None:
        """Change some elements of every tensor, as an optimizer would, only more."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape) * scale * parameter.float().std()
                hit = torch.rand(parameter.shape) < share
                parameter.add_((noise * hit).to(parameter.dtype))

    def publish(self) -> Published:
        """Move the weights and publish the next version."""
        self.move()
        return self.publisher.publish(self.model.named_parameters())

    def follower(self) -> Follower:
        """A new replica's side, with an empty cache."""
        self.followers += 1
        return Follower(self.store, self.run_id, self.folder / f"cache{self.followers}")

    async def start(self, engine: TorchEngine, follower: Follower) -> None:
        """Bring an engine to the newest version."""
        head = follower.head()
        await engine.start(
            follower.model_dir(),
            follower.fetch(follower.route(None, head.version)),
            manifest=follower.manifest(),
            version=PolicyVersion(head.version),
        )

    async def follow(
        self, engine: TorchEngine, follower: Follower, *, mode: SwapMode = "keep"
    ) -> ApplyReport:
        """Stage and apply what leads to the newest version."""
        return await engine.apply(await self.stage(engine, follower), mode=mode)

    async def stage(self, engine: TorchEngine, follower: Follower) -> StagedUpdate:
        """Stage what leads to the newest version."""
        route = follower.route(engine.version, follower.head().version)
        return await engine.stage(follower.fetch(route))

    @torch.no_grad()
    def logprobs(self, token_ids: list[int], *, temperature: float = 1.0) -> torch.Tensor:
        """[len - 1] of each token given those before it, by a plain forward of transformers."""
        logits = self.model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


MakeRun = Callable[..., TinyRun]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Found a run of a random model: `make_run(dtype=torch.bfloat16, tied=True)`."""
    publishers: list[Publisher] = []

    def make(
        *,
        dtype: torch.dtype = torch.bfloat16,
        tied: bool = True,
        seed: int = 0,
        name: str = "tiny",
        model: PreTrainedModel | None = None,
        anchor_shard_bytes: int = ANCHOR_SHARD_BYTES,
        swap_mode: SwapMode | None = None,
    ) -> TinyRun:
        torch.manual_seed(seed)
        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
        model = (model or LlamaForCausalLM(config)).to(dtype).eval()
        folder = tmp_path / name
        model.config.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        store = LocalStore(folder / "bucket")
        publisher = Publisher.open(
            store,
            run_id=name,
            named_tensors=model.named_parameters(remove_duplicate=False),
            base_model="tiny",
            model_files={path.name: path for path in (folder / "model").iterdir()},
            master_dtype="F32",
            anchor_every=1000,
            anchor_shard_bytes=anchor_shard_bytes,
            swap_mode=swap_mode,
        )
        publishers.append(publisher)
        return TinyRun(
            model=model, tokenizer=tokenizer, publisher=publisher, store=store, folder=folder
        )

    yield make
    for publisher in publishers:
        publisher.close()


MakeEngine = Callable[..., Awaitable[tuple[TorchEngine, Follower]]]


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    """Start engines on a run: `engine, follower = await make_engine(run)`."""
    engines: list[TorchEngine] = []

    async def make(run: TinyRun, *, limits: Limits | None = None) -> tuple[TorchEngine, Follower]:
        engine, follower = TorchEngine(limits=limits), run.follower()
        engines.append(engine)
        await run.start(engine, follower)
        return engine, follower

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def layout_of() -> Callable[[TinyRun], Layout]:
    """The run's layout as the trainer sees it."""
    return lambda run: run.publisher.layout


@dataclass(kw_only=True)
class Serving:
    """A replica's app, running in this process."""

    run: TinyRun | None
    service: Inference
    app: FastAPI
    token: str

    @property
    def engine(self) -> TorchEngine:
        """What generates."""
        assert isinstance(self.service.engine, TorchEngine)
        return self.service.engine

    @property
    def replica(self) -> Replica:
        """What follows."""
        return self.service.replica

    def http_client(self, *, token: str | None = None) -> httpx.AsyncClient:
        """A client whose requests go straight to the app."""
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://replica",
            headers={"Authorization": f"Bearer {token or self.token}"},
        )

    async def serves(self, version: int) -> None:
        """Return when that version is live."""
        while self.engine.version != version or self.replica.state != "serving":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Serving]]:
    """Run a replica's app on a run: `async with serve(run, poll_s=60) as serving: ...`."""

    @asynccontextmanager
    async def serving(
        run: TinyRun | None, *, joined: bool = True, **values: object
    ) -> AsyncIterator[Serving]:
        token = secrets.token_urlsafe(8)
        settings = InferenceSettings.model_validate(
            {
                **({"store": run.store.uri, "run_id": run.run_id} if run else {}),
                "token": token,
                "poll_s": 0.05,
                "replica_id": "replica-1",
                **values,
            }
        )
        service = Inference(settings, TorchEngine())
        app = build_app(service)
        async with app.router.lifespan_context(app):
            if joined:
                await service.replica.joined()
            yield Serving(run=run, service=service, app=app, token=token)

    return serving
