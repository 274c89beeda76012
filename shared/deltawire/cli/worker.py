"""`deltawire worker`: a producer on its own, between the streams, N replicas and M environments.

It runs beside the trainer (which then opens no port to the world) or anywhere from where the three
can be reached. Replicas that have no streams of their own are registered through it, so that the
trainer knows whom to tell of new weights. It ends when the run has ended, or on SIGTERM, which
finishes or gives back what it holds.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from deltawire.control.client import ServiceClient
from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import (
    DeltawireError,
    RemoteError,
    SettingsError,
    StoreError,
    StreamError,
)
from deltawire.rollout.environment import EnvironmentClient
from deltawire.rollout.group import StragglerPolicy
from deltawire.rollout.policy import HttpPolicy
from deltawire.rollout.producer import Producer
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.tokenizer import ChatTokenizer
from deltawire.store.open import open_store
from deltawire.streams.base import ProducerStreams
from deltawire.streams.open import open_streams
from deltawire.sync.reader import RunReader

_LOOK_S = 5.0
"""Between two looks at replicas and at the run's head, and between two progress lines."""
_TIME_TO_LIVE_S = 20.0
_WAIT_FOR_RUN_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker has to know."""

    streams: str
    store: str
    run_id: str
    inference: list[str]
    environment: list[str]
    cache_dir: Path
    concurrency: int = 16
    drain_s: float = 30.0
    stragglers: StragglerPolicy = field(default_factory=StragglerPolicy)
    token: SecretStr | None = None
    hub_token: SecretStr | None = None
    """For the proxy of private Spaces, and for a bucket on the Hub."""
    private_spaces: bool = False


def run_worker(options: WorkerOptions) -> int:
    """Work until the end; 0 when everything held was finished or given back."""
    asyncio.run(work(options))
    return 0


async def work(options: WorkerOptions) -> Producer:
    """Produce until the run ends or SIGTERM comes; the producer, for its counters."""
    headers = proxy_headers(options)
    reader = RunReader(
        open_store(options.store, token=options.hub_token), options.run_id, options.cache_dir
    )
    renderer = Renderer(await _tokenizer(reader))
    streams = open_streams(options.streams, run_id=options.run_id, token=options.token)
    policy = HttpPolicy(options.inference, token=options.token, headers=headers)
    producer = Producer(
        streams=streams,
        policy=policy,
        environment=EnvironmentClient(options.environment, token=options.token, headers=headers),
        renderer=renderer,
        concurrency=options.concurrency,
        stragglers=options.stragglers,
    )
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, producer.drain)
    beside = [
        asyncio.create_task(_again_and_again(look))
        for look in (
            lambda: _register_replicas(options, streams),
            lambda: _drain_at_the_end(reader, producer),
            lambda: _say(producer),
        )
    ]
    try:
        await producer.run(drain_s=options.drain_s)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await policy.close()
        await streams.close()
        reader.store.close()
    return producer


def proxy_headers(options: WorkerOptions) -> dict[str, str]:
    """The Hub token for private Spaces' proxies; it is never shown to anyone else."""
    if not options.private_spaces:
        return {}
    if options.hub_token is None:
        raise SettingsError("--private-spaces needs a Hub token in HF_TOKEN")
    for url in (*options.inference, *options.environment):
        parts = urlsplit(url)
        if parts.scheme != "https" or not (parts.hostname or "").endswith(".hf.space"):
            raise SettingsError(f"--private-spaces: {url} is no https://….hf.space address")
    return {"Authorization": f"Bearer {options.hub_token.get_secret_value()}"}


async def _tokenizer(reader: RunReader) -> ChatTokenizer:
    """From the run's model files; waits until the run is there."""
    waiting = False
    while True:
        try:
            folder = await asyncio.to_thread(reader.model_dir)
            return await asyncio.to_thread(ChatTokenizer.from_folder, folder)
        except StoreError as error:
            if not waiting:
                log.warning("waiting for the run", extra={"reason": str(error)})
            waiting = True
            await asyncio.sleep(_WAIT_FOR_RUN_S)


async def _again_and_again(look: Callable[[], Awaitable[None]]) -> None:
    """What one look finds wrong, the next may find right: a worker that stopped looking would never
    learn that its run has ended."""
    while True:
        try:
            await look()
        except DeltawireError as error:
            log.warning("a look failed", extra={"reason": f"{type(error).__name__}: {error}"})
        await asyncio.sleep(_LOOK_S)


async def _register_replicas(options: WorkerOptions, streams: ProducerStreams) -> None:
    """Let the trainer know the replicas that answer, under the URLs by which we reach them."""
    headers = proxy_headers(options)
    for url in options.inference:
        try:
            async with ServiceClient(url, token=options.token, headers=headers) as client:
                status = await client.status(ReplicaStatus)
            await streams.register(status.model_copy(update={"url": url}), ttl_s=_TIME_TO_LIVE_S)
        except (RemoteError, StreamError) as error:
            log.warning("replica not registered", extra={"url": url, "reason": str(error)})


async def _drain_at_the_end(reader: RunReader, producer: Producer) -> None:
    head = await asyncio.to_thread(reader.head)
    if head.state == "finished":
        producer.drain()


async def _say(producer: Producer) -> None:
    done = producer.counters
    sys.stdout.write(
        f"groups {done.groups_finished}  given back {done.groups_given_back}  "
        f"episodes running {done.episodes_running}  tokens {done.tokens_sampled}  "
        f"waits for {producer.waits_for or 'nothing'}\n"
    )
    sys.stdout.flush()
