"""`deltawire worker` between a trainer's HTTPS face, replicas and an environment, over HTTP."""

import asyncio
import contextlib
import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import typer
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, SecretStr

from deltawire.cli import rollout_commands, worker
from deltawire.cli.worker import WorkerOptions, proxy_headers, work
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import Head, Link, ModelFile, RunManifest
from deltawire.protocol.control import GENERATE, STATUS, ReplicaStatus
from deltawire.protocol.errors import MalformedMessage, ObjectMissing, SettingsError
from deltawire.protocol.generation import Completion, GenerateRequest, GenerateResponse
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.rollouts import Task, Ticket
from deltawire.protocol.versions import VersionSpan
from deltawire.service.app import create_service_app
from deltawire.service.auth import TokenAuth
from deltawire.service.metrics import Metrics
from deltawire.service.serve import bind
from deltawire.service.streams_face import create_streams_router
from deltawire.store.local import LocalStore
from deltawire.streams.memory import MemoryStreams
from deltawire.sync.publisher import Publisher
from deltawire_environment.app import Environment, create_app
from deltawire_environment.settings import EnvironmentSettings

TOKEN = SecretStr("one-token-for-all-three")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextlib.asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
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


def replica_app(name: str, says: list[int]) -> FastAPI:
    """/v1/generate and /status of a replica, with a fixed answer."""
    app = FastAPI()
    app.add_middleware(TokenAuth, token=TOKEN)

    @app.get(STATUS)
    async def status() -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=name, run_id="run", engine="torch", state="serving", version=3
        )

    @app.post(GENERATE)
    async def generate(request: GenerateRequest) -> GenerateResponse:
        completion = Completion(
            token_ids=says,
            logprobs=[-0.5] * len(says),
            finish_reason="stop",
            spans=[VersionSpan(version=3, start=0, end=len(says))],
        )
        return GenerateResponse(completions=[completion] * request.n, replica_id=name)

    return app


def trainer_app(streams: MemoryStreams) -> FastAPI:
    async def status() -> BaseModel:
        return BaseModel()

    app = create_service_app(
        title="trainer",
        status=status,
        unready=lambda: "",
        metrics=Metrics("trainer"),
        token=TOKEN,
    )
    app.include_router(create_streams_router(streams))
    return app


async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_LOOK_S", 0.0)
    drained = asyncio.Event()
    heads = iter([MalformedMessage("half a latest.json"), ObjectMissing("gone"), "finished"])

    class Reader:
        def head(self) -> SimpleNamespace:
            found = next(heads)
            if isinstance(found, Exception):
                raise found
            return SimpleNamespace(state=found)

    producer = SimpleNamespace(drain=drained.set)
    looking = asyncio.create_task(
        worker._again_and_again(lambda: worker._drain_at_the_end(Reader(), producer))
    )
    try:
        await asyncio.wait_for(drained.wait(), 60)
    finally:
        looking.cancel()
        await asyncio.wait({looking})


@pytest.fixture
def bucket(tmp_path):
    """A run's bucket with a tokenizer in it; `finish()` ends the run."""
    store = LocalStore(tmp_path / "bucket")
    vocabulary = {"[UNK]": 0, "<|im_start|>": 1, "<|im_end|>": 2, "crane": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "chat_template.jinja": TEMPLATE,
        "tokenizer_config.json": '{"eos_token": "<|im_end|>"}',
    }
    listed = []
    for name, text in files.items():
        source = tmp_path / name
        source.write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        listed.append(ModelFile(name=name, sha256=digest, bytes=len(text.encode())))
        store.put(f"run/model/{name}", source)
    manifest = RunManifest(
        run_id="run",
        base_model="tiny",
        layout_digest=Layout([]).digest,
        tensors=[],
        model_files=listed,
    )
    store.swap("run/run.json", manifest.model_dump_json().encode(), expect=None)
    link = Link(
        version=0,
        kind=ObjectKind.ANCHOR,
        key="anchors/step_000000.safetensors",
        bytes=0,
        sha256="0" * 64,
        new_digest="0" * 32,
    )

    def finish() -> None:
        head = Head(run_id="run", state="finished", links=[link])
        store.swap("run/latest.json", head.model_dump_json().encode(), expect=None)

    return store, finish


async def test_a_worker_serves_a_trainer_it_can_only_reach_by_https(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("deltawire.cli.worker._LOOK_S", 0.1)
    monkeypatch.delenv("ENVIRONMENT_JOB", raising=False)
    store, finish = bucket
    streams = MemoryStreams()
    environment = Environment(EnvironmentSettings(worlds=["guess"], token=TOKEN), None)
    async with (
        served(trainer_app(streams)) as trainer,
        served(replica_app("r1", [3, 2])) as first,
        served(replica_app("r2", [3, 2])) as second,
        served(create_app(environment)) as world,
    ):
        tickets = [
            Ticket(ticket_id=f"t-{n}", task=Task(seed=n), group_size=4, max_turns=2)
            for n in range(4)
        ]
        await streams.issue(tickets)
        options = WorkerOptions(
            streams=trainer,
            store=store.uri,
            run_id="run",
            inference=[first, second],
            environment=[world],
            cache_dir=tmp_path / "cache",
            token=TOKEN,
        )
        working = asyncio.create_task(work(options))
        groups = []
        async with asyncio.timeout(60.0):
            while len(groups) < 4:
                groups += await streams.read(limit=4, timeout_s=1.0)
            while len(await streams.replicas()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        known = await streams.replicas()
        finish()
        async with asyncio.timeout(30.0):
            producer = await working

    rollouts = [rollout for d in groups for rollout in d.group.rollouts]
    assert {d.group.group_id for d in groups} == {"t-0", "t-1", "t-2", "t-3"}
    assert {r.status for r in rollouts} <= {"ok", "truncated"}
    assert all(r.sequences[0].token_ids.count(3) >= 1 for r in rollouts)
    assert {status.url for status in known} == {first, second}
    assert producer.counters.groups_finished == 4
    assert len(environment.sessions) == 0


async def test_the_trainers_face_asks_for_the_token(bucket):
    from deltawire.streams.gateway import GatewayStreams

    async with served(trainer_app(MemoryStreams())) as trainer:
        stranger = GatewayStreams(trainer, token="guess")
        with pytest.raises(Exception, match="401"):
            await stranger.claim("p", timeout_s=0.0)
        await stranger.close()


def options_for(*, private_spaces: bool, hub_token: str | None, url: str) -> WorkerOptions:
    return WorkerOptions(
        streams="memory://x",
        store="file:///x",
        run_id="run",
        inference=[url],
        environment=["https://org-env.hf.space"],
        cache_dir="x",
        private_spaces=private_spaces,
        hub_token=None if hub_token is None else SecretStr(hub_token),
    )


def test_the_hub_token_is_shown_to_spaces_only():
    space = "https://org-space.hf.space"
    given = options_for(private_spaces=True, hub_token="hf_x", url=space)
    assert proxy_headers(given) == {"Authorization": "Bearer hf_x"}
    assert proxy_headers(options_for(private_spaces=False, hub_token="hf_x", url=space)) == {}
    for url in ("https://example.com", "http://org-space.hf.space"):
        with pytest.raises(SettingsError, match="no https"):
            proxy_headers(options_for(private_spaces=True, hub_token="hf_x", url=url))
    with pytest.raises(SettingsError, match="HF_TOKEN"):
        proxy_headers(options_for(private_spaces=True, hub_token=None, url=space))


@pytest.mark.parametrize(("text", "says"), [("", "at least one"), ("redis://x", "no http")])
def test_addresses_are_judged_before_anything_starts(text, says):
    with pytest.raises(SettingsError, match=says):
        rollout_commands.urls_in(text)


def test_both_commands_can_be_mounted():
    app = typer.Typer()
    app.command()(rollout_commands.worker)
    app.command()(rollout_commands.rollouts)
    names = {command.callback.__name__ for command in app.registered_commands}
    assert names == {"worker", "rollouts"}


def test_a_worker_reads_its_run_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    store = LocalStore(tmp_path / "bucket")
    with Publisher.open(
        store,
        run_id="run",
        named_tensors=[("weight", torch.zeros(3))],
        model_files={"config.json": tmp_path / "config.json"},
    ):
        pass
    code = f"""
import sys
from pathlib import Path
import deltawire.cli.main, deltawire.cli.worker
from deltawire.store.open import open_store
from deltawire.sync.reader import RunReader
reader = RunReader(open_store({store.uri!r}), "run", Path({str(tmp_path / "cache")!r}))
print(reader.head().version, reader.manifest().tensors[0].name, *reader.model_dir().iterdir())
print([name for name in ("torch", "transformers", "numba") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )

    told, heavy = done.stdout.splitlines()
    assert told.startswith("0 weight ") and told.endswith("/config.json")
    assert heavy == "[]"
