"""The vLLM engine: `vllm serve` as a child, patched in place. See engines/base.py for the seam.

A child that ends leaves the engine without a version: requests then raise ReplicaBroken until
`start` is called again, which re-bases a new child on the newest published weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

from deltawire.codec.adapter import base_layout
from deltawire.codec.bits import torch_type
from deltawire.codec.digest import Digest
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import RunManifest
from deltawire.protocol.errors import (
    DigestMismatch,
    EngineError,
    MalformedMessage,
    ReplicaBroken,
    VersionNotServed,
)
from deltawire.protocol.generation import GenerateRequest, GenerateResponse
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion
from deltawire_inference.engines.base import (
    ApplyReport,
    EngineLoad,
    SampledToken,
    StagedUpdate,
    SwapMode,
)
from deltawire_inference.engines.rate import TokenRate
from deltawire_inference.engines.route import Objects
from deltawire_inference.engines.vllm.adapters import Adapters
from deltawire_inference.engines.vllm.checkpoint import WEIGHTS, write_checkpoint
from deltawire_inference.engines.vllm.child import VllmChild
from deltawire_inference.engines.vllm.client import PauseMode, SwapAnswer, VllmClient, WorkerCalls
from deltawire_inference.engines.vllm.options import (
    MODEL_NAME,
    VllmOptions,
    serve_command,
    serve_environment,
)
from deltawire_inference.engines.vllm.policy_adapter import (
    PolicyAdapter,
    StagedAdapter,
    empty_adapter,
)
from deltawire_inference.engines.vllm.remote_weights import RankMap
from deltawire_inference.engines.vllm.requests import (
    PIN_RETRY_S,
    completion_of,
    request_body,
    require_pin,
    score_body,
    scores_of,
)
from deltawire_inference.engines.vllm.staging import StagedPatch, Stager
from deltawire_inference.engines.vllm.streaming import tokens_of_event
from deltawire_inference.engines.vllm.workspace import Workspace
from deltawire_inference.vllm_plugin.checkpoint_map import UnmappableName
from deltawire_inference.vllm_plugin.swap_route import SwapOrder

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_PAUSES: dict[SwapMode, tuple[PauseMode, bool]] = {
    "keep": ("keep", True),
    "keep_kv": ("keep", False),
    "drain": ("wait", True),
    "abort": ("abort", True),
}
"""Swap mode -> vLLM's pause mode, and whether all cached keys and values are dropped."""
_UNLABELLED: dict[str, Any] = {"weight_versions": None}


@dataclass(slots=True, kw_only=True)
class _Running:
    """What exists while a child runs."""

    client: VllmClient
    swap: Callable[[SwapOrder], Awaitable[SwapAnswer]]
    calls: WorkerCalls
    stager: Stager
    adapters: Adapters
    policy: PolicyAdapter | None
    """In a LoRA run."""
    version: PolicyVersion
    digest: Digest

    @property
    def model(self) -> str:
        """What requests ask vLLM for unless they name an adapter."""
        return MODEL_NAME if self.policy is None else self.policy.name

    def keeping(self, model: str) -> AbstractAsyncContextManager[None]:
        """Keep what a request asks for loaded until it has ended."""
        return nullcontext() if self.policy is None else self.policy.used(model)


class VllmEngine:
    """Stock vLLM of 0.29 or newer, with our plugin installed beside it."""

    name = "vllm"

    def __init__(self, options: VllmOptions) -> None:
        self.capabilities = options.capabilities
        self._options = options
        self._workspace = Workspace(options.state_dir)
        self._child = VllmChild(socket=self._workspace.socket, memory=self._workspace.memory)
        self._running: _Running | None = None
        self._rate = TokenRate()
        self._in_flight = 0

    @property
    def version(self) -> PolicyVersion | None:
        """See Engine. None too when the child has ended."""
        return self._running.version if self._running and self._child.alive else None

    @property
    def digest(self) -> str:
        """See Engine."""
        return str(self._running.digest) if self._running else ""

    async def start(
        self, model_dir: Path, objects: Objects, *, manifest: RunManifest, version: PolicyVersion
    ) -> None:
        """See Engine. Merges the route on disk, starts a child on it and learns its map."""
        await self.close()
        self._workspace.open()
        checkpoint = self._workspace.disk / f"checkpoint-{version}"
        adapter = {} if manifest.adapter is None else empty_adapter(Layout(manifest.tensors))
        digest = await asyncio.to_thread(
            write_checkpoint,
            model_dir,
            objects,
            manifest=manifest,
            target=checkpoint,
            adapter=adapter,
        )
        client = VllmClient(self._workspace.socket)
        try:
            self._running = await self._run_child(
                client,
                checkpoint,
                model_dir=model_dir,
                manifest=manifest,
                version=version,
                digest=digest,
                adapter=adapter,
            )
        except BaseException:
            await self._child.stop()
            await client.close()
            raise

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See Engine."""
        running = self._ready()
        body, version = _body(request, running), running.version
        self._in_flight += request.n
        try:
            async with running.keeping(body["model"]):
                answer = await self._answer(running.client.generate(body))
        finally:
            self._in_flight -= request.n
        own = running.policy is not None
        if not own:
            version = running.version
        completions = [
            # A request ends under the adapter it began with, whatever became the label meanwhile.
            completion_of(choice | _UNLABELLED if own else choice, request=request, version=version)
            for choice in answer["choices"]
        ]
        self._rate.add(sum(len(c.token_ids) for c in completions))
        require_pin(request, [s.version for c in completions for s in c.spans], running.version)
        answered_by = answer.get("model")
        if answered_by != body["model"]:
            raise EngineError(f"{body['model']!r} was asked for, {answered_by!r} answered")
        adapter = body["model"] if own else request.adapter
        return GenerateResponse(completions=completions, adapter=adapter)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[SampledToken, None]:
        """See Engine. vLLM gives spans only at the end: tokens carry the version live meanwhile."""
        running = self._ready()
        body, began_at = _body(request, running) | {"stream": True}, running.version
        self._in_flight += request.n
        try:
            async with running.keeping(body["model"]):
                async for line in running.client.stream(body):
                    version = running.version if running.policy is None else began_at
                    require_pin(request, [version], running.version)
                    for token in tokens_of_event(json.loads(line), version=version):
                        self._rate.add(int(token.token_id is not None))
                        yield token
        finally:
            self._in_flight -= request.n

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See Engine."""
        running = self._ready()
        answer = await self._answer(
            running.client.score(score_body(token_ids, model=running.model))
        )
        return scores_of(answer, token_ids)

    async def stage(self, objects: Objects) -> StagedUpdate:
        """See Engine. What cannot go in place ends the child: `start` merges it on disk instead."""
        running = self._ready()
        if running.policy is not None:
            return await self._stage_adapter(running, running.policy, objects)
        try:
            return await asyncio.to_thread(running.stager.stage, objects, held=running.digest)
        except UnmappableName as error:
            await self.close()
            raise ReplicaBroken(f"{error}; vLLM is started again on the newest version") from error

    async def apply(self, staged: StagedUpdate, *, mode: SwapMode) -> ApplyReport:
        """See Engine. Where ranks disagree the child is stopped: nothing half applied serves."""
        running, patch = self._ready(), staged.token
        assert isinstance(patch, StagedPatch | StagedAdapter)
        try:
            pause_s = await self._enter(running, patch, staged, mode)
        except (EngineError, DigestMismatch):
            if isinstance(patch, StagedPatch) and self._running is running:
                await asyncio.to_thread(running.stager.let_go, patch)
            raise
        return ApplyReport(pause_s=pause_s, mode=mode, digest=staged.new_digest)

    async def _enter(
        self,
        running: _Running,
        patch: StagedPatch | StagedAdapter,
        staged: StagedUpdate,
        mode: SwapMode,
    ) -> float:
        """Returns the pause in seconds. DigestMismatch for what was made for other weights."""
        if patch.base_digest != str(running.digest):
            raise DigestMismatch(
                f"staged version {staged.version}",
                expected=patch.base_digest,
                actual=str(running.digest),
            )
        if isinstance(patch, StagedAdapter):
            return await asyncio.shield(self._swap_adapter(running, patch, staged, mode))
        pause_s = await asyncio.shield(self._swap(running, patch.key, staged, mode))
        if patch.checkpoint is not None:
            await asyncio.to_thread(shutil.rmtree, patch.checkpoint, ignore_errors=True)
        return pause_s

    async def verify(self) -> str:
        """See Engine. Reads the weights while tokens flow, so do not apply meanwhile."""
        running = self._ready()
        digest = await asyncio.to_thread(running.stager.recomputed)
        if running.policy is not None:
            own = running.policy.digest_part()
            digest = digest.plus((own.a, own.b))
        return str(digest)

    async def checksums(self) -> dict[str, str]:
        """vLLM's own sha256 of every runtime parameter (`/weight_checker`), by name."""
        return await self._answer(self._ready().client.checksums())

    async def load_adapter(self, name: str, path: Path) -> None:
        """See Engine. A version has a name of its own; the oldest beyond the limit go."""
        if "adapters" not in self.capabilities:
            raise EngineError(f"adapter {name!r}: this replica serves none; set how many it holds")
        if self._ready().policy is not None:
            raise EngineError(f"adapter {name!r}: this run's policy is an adapter itself")
        await self._ready().adapters.load(name, path)

    async def pause(self) -> None:
        """See Engine."""
        await self._answer(self._ready().client.pause("keep", clear_cache=False))

    async def resume(self) -> None:
        """See Engine."""
        await self._answer(self._ready().client.resume())

    def load(self) -> EngineLoad:
        """See Engine."""
        return EngineLoad(
            running=self._in_flight,
            waiting=0,
            tokens_total=self._rate.total,
            tokens_per_s=self._rate.per_s(),
        )

    async def close(self) -> None:
        """See Engine."""
        running, self._running = self._running, None
        await self._child.stop()  # whoever waits for an answer learns that none comes
        if running is not None:
            await running.client.close()
            await asyncio.to_thread(running.calls.close)
        await asyncio.to_thread(self._workspace.close)

    async def _run_child(
        self,
        client: VllmClient,
        checkpoint: Path,
        *,
        model_dir: Path,
        manifest: RunManifest,
        version: PolicyVersion,
        digest: Digest,
        adapter: Mapping[str, torch.Tensor],
    ) -> _Running:
        options = self._options.for_run(manifest)
        command = serve_command(
            options,
            model_dir=checkpoint,
            socket=self._workspace.socket,
            dtype=_serving_dtype(manifest),
        )
        environment = serve_environment(options, os.environ)
        timeout_s = self._options.start_timeout_s
        start_s = await self._child.start(command, environment, client, timeout_s=timeout_s)
        pattern = str(self._workspace.memory / "map-{rank}.safetensors")
        learned = await client.call_workers("deltawire_learn", str(checkpoint), pattern)
        (checkpoint / WEIGHTS).unlink()  # loaded and compared; what is live is in the workers
        calls = WorkerCalls(
            self._workspace.socket,
            self._workspace.memory,
            ranks=len(learned),
            timeout_s=self._options.stage_timeout_s,
            alive=lambda: self._child.alive,
        )
        maps = [RankMap.load(path) for path in calls.paths(pattern)]
        await client.set_version(str(version))
        log.info(
            "vLLM serves",
            extra={"version": version, "start_s": round(start_s, 1), "ranks": learned},
        )
        stager = Stager(
            calls,
            maps,
            manifest=_base_of(manifest),
            model_dir=model_dir,
            disk=self._workspace.disk,
        )
        policy = self._policy_adapter(client, adapter, manifest)
        if policy is not None:
            await policy.load(version, digest)
        return _Running(
            client=client,
            swap=client.swap if await client.has_swap_route() else client.swap_by_parts,
            calls=calls,
            stager=stager,
            adapters=Adapters(client, self._workspace.disk, limit=options.adapters),
            policy=policy,
            version=version,
            digest=digest,
        )

    def _policy_adapter(
        self, client: VllmClient, tensors: Mapping[str, torch.Tensor], manifest: RunManifest
    ) -> PolicyAdapter | None:
        """What serves the policy in an adapter run; None in others."""
        if manifest.adapter is None:
            return None
        return PolicyAdapter(
            client,
            tensors,
            manifest=manifest,
            adapter=manifest.adapter,
            folder=self._workspace.disk,
        )

    async def _swap(
        self, running: _Running, key: str, staged: StagedUpdate, mode: SwapMode
    ) -> float:
        """Returns the pause in seconds."""
        pause_mode, clear_cache = _PAUSES[mode]
        order = SwapOrder(
            key=key, label=str(staged.version), mode=pause_mode, clear_cache=clear_cache
        )
        try:
            answer = await running.swap(order)
        except EngineError as error:
            await self.close()
            raise ReplicaBroken(f"the swap to version {staged.version} failed: {error}") from error
        if answer.ranks_disagree:
            await self.close()
            reason = answer.refusals[0]
            raise ReplicaBroken(f"only some ranks took version {staged.version}: {reason}")
        if answer.refusals:
            raise EngineError(f"version {staged.version} was not applied: {answer.refusals[0]}")
        running.version, running.digest = staged.version, Digest.parse(staged.new_digest)
        return answer.pause_s

    async def _stage_adapter(
        self, running: _Running, policy: PolicyAdapter, objects: Objects
    ) -> StagedUpdate:
        """Verify a route of adapters and have the child load its end, while tokens flow."""
        first, last = objects[0][0], objects[-1][0]
        if first.kind is ObjectKind.ANCHOR:
            await self.close()
            raise ReplicaBroken("the run was anchored anew; vLLM is started again on it")
        held = running.digest
        patches, digest = await asyncio.to_thread(policy.read, objects, held=held)
        token = await policy.stage(patches, version=last.version, held=held, digest=digest)
        return StagedUpdate(
            version=last.version,
            base_version=first.base_version,
            new_digest=str(digest),
            changed=sum(patch.changed for patch in patches),
            total=last.total or 0,
            token=token,
        )

    async def _swap_adapter(
        self, running: _Running, patch: StagedAdapter, staged: StagedUpdate, mode: SwapMode
    ) -> float:
        """New requests ask for the new version; drain and abort see the running ones off first."""
        assert running.policy is not None
        started, waits = monotonic(), mode in ("drain", "abort")
        try:
            if waits:
                await running.client.pause(_PAUSES[mode][0], clear_cache=False)
            running.version, running.digest = staged.version, Digest.parse(staged.new_digest)
            await running.policy.enter(patch)
            if waits:
                await running.client.resume()
        except EngineError as error:
            await self.close()
            raise ReplicaBroken(f"the swap to version {staged.version} failed: {error}") from error
        return monotonic() - started if waits else 0.0

    def _ready(self) -> _Running:
        if self._running is None:
            raise ReplicaBroken("no weights are loaded yet")
        if not self._child.alive:
            raise ReplicaBroken(
                f"vLLM has ended; start it again. Its last lines:\n{self._child.tail}"
            )
        return self._running

    async def _answer(self, call: Awaitable[Answer]) -> Answer:
        """The call's answer; when the child died meanwhile, that is the error to report."""
        try:
            return await call
        except EngineError:
            self._ready()
            raise


def _body(request: GenerateRequest, running: _Running) -> dict[str, Any]:
    """Check what the request asks for, and spell it as vLLM does."""
    serving = running.version
    floor = request.min_version
    require_pin(request, [serving], serving)
    if floor is not None and floor > serving:
        raise VersionNotServed(wanted=floor, serving=serving, retry_after_s=PIN_RETRY_S)
    names = running.adapters.names if running.policy is None else (running.policy.name,)
    if request.adapter is not None and request.adapter not in names:
        raise MalformedMessage(f"adapter {request.adapter!r} is not loaded; loaded are {names}")
    return request_body(request, version=serving, model=request.adapter or running.model)


def _base_of(manifest: RunManifest) -> RunManifest:
    """What the child's weights are: all but an adapter."""
    base = base_layout(Layout(manifest.tensors))
    return manifest.model_copy(update={"tensors": base.specs})


def _serving_dtype(manifest: RunManifest) -> str:
    """What most elements were published in: served wider or narrower, their bits would be lost."""
    elements: dict[str, int] = {}
    for tensor in manifest.tensors:
        count = math.prod(tensor.shape)
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + count
    word = max(elements, key=elements.__getitem__)
    return str(torch_type(word)).removeprefix("torch.")
