"""The torch engine: a transformers model in this process. See engines/base.py for the seam."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from deltawire.codec.patch import Layout
from deltawire.protocol.adapters import adapter_name
from deltawire.protocol.chain import RunManifest
from deltawire.protocol.errors import (
    DeltawireError,
    EngineError,
    MalformedMessage,
    ReplicaBroken,
    VersionNotServed,
)
from deltawire.protocol.generation import GenerateRequest, GenerateResponse
from deltawire.protocol.versions import PolicyVersion, newest
from deltawire_inference.engines.background import yield_to_sampling
from deltawire_inference.engines.base import (
    ApplyReport,
    EngineLoad,
    SampledToken,
    StagedUpdate,
    SwapMode,
)
from deltawire_inference.engines.route import Objects
from deltawire_inference.engines.torch.core import EngineCore, Limits
from deltawire_inference.engines.torch.flight import PIN_RETRY_S, Flight, completion_of
from deltawire_inference.engines.torch.loop import EngineLoop
from deltawire_inference.engines.torch.model import LoadedModel, build_model
from deltawire_inference.engines.torch.policy_adapter import PolicyAdapter
from deltawire_inference.engines.torch.row import Row, dice_of
from deltawire_inference.engines.torch.stops import StopRule
from deltawire_inference.engines.torch.weights import LiveWeights

P = ParamSpec("P")
T = TypeVar("T")


class _Parts:
    """What exists between `start` and `close`."""

    def __init__(
        self, loaded: LoadedModel, weights: LiveWeights, core: EngineCore, *, adapts: bool
    ) -> None:
        self.loaded, self.weights, self.core = loaded, weights, core
        self.adapts = adapts
        """Whether the policy is an adapter, whose versions have names."""
        self.loop = EngineLoop(core)

    def answered_by(self, asked: str | None, version: int) -> str | None:
        """The adapter behind an answer."""
        return adapter_name(version) if self.adapts else asked


class TorchEngine:
    """Continuous batching on a CPU (or one GPU), weights swapped between two forward passes."""

    name = "torch"
    capabilities = frozenset({"adapters", "sampling_mask", "score"})

    def __init__(self, *, limits: Limits | None = None, device: str = "cpu") -> None:
        self._limits = limits or Limits()
        self._device = torch.device(device)
        self._parts: _Parts | None = None
        self._stager = ThreadPoolExecutor(
            1, thread_name_prefix="stage", initializer=yield_to_sampling
        )

    @property
    def version(self) -> PolicyVersion | None:
        """See Engine."""
        return PolicyVersion(self._parts.core.version) if self._parts else None

    @property
    def digest(self) -> str:
        """See Engine."""
        return str(self._parts.weights.digest) if self._parts else ""

    @property
    def max_length(self) -> int:
        """Tokens of one sequence, prompt included."""
        return min(self._limits.max_length, self._ready().loaded.max_length)

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that are served, by name; for checks, not for writing."""
        return self._ready().loaded.named_tensors()

    async def start(
        self,
        model_dir: Path,
        objects: Objects,
        *,
        manifest: RunManifest,
        version: PolicyVersion,
    ) -> None:
        """See Engine. A second start ends what runs and begins anew."""
        await self.close()
        self._parts = await asyncio.to_thread(self._load, model_dir, objects, manifest, version)
        self._parts.loop.start()
        try:
            await self.score([0, 0])
        except (DeltawireError, RuntimeError, TypeError, ValueError) as error:
            await self.close()
            raise EngineError(f"this model does not run on the torch engine: {error}") from error

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See Engine. In a LoRA run the answer names the version that gave its newest token."""
        parts = self._ready()
        with self._flying(request, streams=False) as flight:
            while await flight.next_token() is not None:
                pass
        completions = [completion_of(row) for row in flight.rows]
        last = newest(span for completion in completions for span in completion.spans)
        version = parts.core.version if last is None else last
        return GenerateResponse(
            completions=completions, adapter=parts.answered_by(request.adapter, version)
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[SampledToken, None]:
        """See Engine."""
        with self._flying(request, streams=True) as flight:
            while (token := await flight.next_token()) is not None:
                yield token

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See Engine."""
        parts = self._ready()
        _check_ids(token_ids, parts.loaded)
        ids = list(token_ids)
        return await asyncio.wrap_future(parts.loop.between_steps(lambda: parts.core.score(ids)))

    async def stage(self, objects: Objects) -> StagedUpdate:
        """See Engine. Runs beside the engine's thread, and yields to it."""
        return await self._aside(self._ready().weights.stage, objects)

    async def apply(self, staged: StagedUpdate, *, mode: SwapMode) -> ApplyReport:
        """See Engine."""
        parts = self._ready()
        outcome = await asyncio.wrap_future(
            parts.loop.swap(lambda: parts.weights.enter(staged), mode=mode, version=staged.version)
        )
        return ApplyReport(
            pause_s=outcome.pause_s,
            mode=outcome.mode,
            digest=str(parts.weights.digest),
            recomputed_tokens=outcome.recomputed_tokens,
        )

    async def verify(self) -> str:
        """See Engine. Between two swaps, so the caller must not apply meanwhile."""
        return str(await self._aside(self._ready().weights.recomputed))

    async def load_adapter(self, name: str, path: Path) -> None:
        """See Engine. A PEFT folder, or one file with its configuration in the metadata."""
        parts = self._ready()
        if parts.adapts:
            raise EngineError(
                f"adapter {name!r}: this run's policy is an adapter itself; serve other adapters "
                "from a run that trains all weights"
            )
        bank = parts.core.adapters
        adapter = await self._aside(bank.read, name, path)
        await asyncio.wrap_future(parts.loop.between_steps(partial(bank.add, adapter)))

    async def pause(self) -> None:
        """See Engine."""
        await asyncio.wrap_future(self._ready().loop.set_paused(True))

    async def resume(self) -> None:
        """See Engine."""
        await asyncio.wrap_future(self._ready().loop.set_paused(False))

    def load(self) -> EngineLoad:
        """See Engine."""
        if self._parts is None:
            return EngineLoad(running=0, waiting=0, tokens_total=0, tokens_per_s=0.0)
        running, waiting = self._parts.loop.counts
        rate = self._parts.loop.rate
        return EngineLoad(
            running=running, waiting=waiting, tokens_total=rate.total, tokens_per_s=rate.per_s()
        )

    async def close(self) -> None:
        """See Engine."""
        parts, self._parts = self._parts, None
        if parts is not None:
            await asyncio.to_thread(parts.loop.stop)

    def _load(
        self, model_dir: Path, objects: Objects, manifest: RunManifest, version: PolicyVersion
    ) -> _Parts:
        loaded = build_model(model_dir, manifest, device=self._device)
        layout, live = Layout(manifest.tensors), loaded.named_tensors()
        if manifest.adapter is not None:
            adapter = PolicyAdapter(loaded.module, layout, manifest.adapter, device=self._device)
            live = chain(live, adapter.named_tensors())
        weights = LiveWeights(live, layout, run_id=manifest.run_id)
        weights.load(objects)
        core = EngineCore(loaded.module, loaded.shape, limits=self._limits, version=version)
        return _Parts(loaded, weights, core, adapts=manifest.adapter is not None)

    def _ready(self) -> _Parts:
        if self._parts is None:
            raise ReplicaBroken("no weights are loaded yet")
        return self._parts

    def _take_off(self, request: GenerateRequest, *, streams: bool) -> Flight:
        parts = self._ready()
        _check_versions(request, parts.core.version)
        _check_ids(request.prompt_ids, parts.loaded)
        own = parts.answered_by(None, parts.core.version)
        named = request.adapter not in (None, own)
        adapter = parts.core.adapters.get(request.adapter or "") if named else None
        room = self.max_length - len(request.prompt_ids)
        if room < 1:
            raise MalformedMessage(
                f"the prompt has {len(request.prompt_ids)} tokens, {self.max_length - 1} fit"
            )
        stops = StopRule(
            request.sampling,
            eos_ids=parts.loaded.eos_ids,
            max_new=min(request.sampling.max_new_tokens, room),
            decoder=parts.loaded.decoder,
        )
        rows = [
            Row(
                request=request,
                index=index,
                stops=stops,
                dice=dice_of(request, index),
                token_ids=list(request.prompt_ids),
                adapter=adapter,
            )
            for index in range(request.n)
        ]
        flight = Flight(request, rows, streams=streams)
        parts.loop.submit(flight)
        return flight

    @contextmanager
    def _flying(self, request: GenerateRequest, *, streams: bool) -> Iterator[Flight]:
        """A request under way; when its caller leaves early, its rows are freed."""
        loop = self._ready().loop
        flight = self._take_off(request, streams=streams)
        try:
            yield flight
        finally:
            if not flight.over:
                with suppress(EngineError):  # a stopped engine has forgotten it already
                    loop.cancel(flight)

    async def _aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._stager, partial(work, *args, **kwargs))


def _check_versions(request: GenerateRequest, serving: int) -> None:
    """Raises VersionNotServed for a pin or a floor that the live version does not meet."""
    if request.policy_version is not None and request.policy_version != serving:
        raise VersionNotServed(
            wanted=request.policy_version, serving=serving, retry_after_s=PIN_RETRY_S
        )
    if request.min_version is not None and request.min_version > serving:
        raise VersionNotServed(
            wanted=request.min_version, serving=serving, retry_after_s=PIN_RETRY_S
        )


def _check_ids(token_ids: Sequence[int], loaded: LoadedModel) -> None:
    """An id outside the vocabulary would read memory that is not the embedding's."""
    if not token_ids or min(token_ids) < 0 or max(token_ids) >= loaded.vocabulary:
        raise MalformedMessage(f"token ids must be in [0, {loaded.vocabulary})")
