"""The adapter of a LoRA run in a vLLM child: each version under a name of its own.

A version is loaded while tokens flow; the swap is only that new requests ask for its name. Requests
that run keep the adapter they began with, so a completion has one version, and the old adapter is
unloaded when its last request has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from deltawire.codec.adapter import adapter_layout, write_adapter
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.bits import tensor_of, torch_type
from deltawire.codec.digest import Digest, digest_part
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.adapters import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    AdapterManifest,
    adapter_name,
)
from deltawire.protocol.chain import RunManifest
from deltawire.protocol.errors import EngineError
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.versions import PolicyVersion
from deltawire_inference.engines.route import Objects, read_route
from deltawire_inference.engines.vllm.client import VllmClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedAdapter:
    """A version that the child has loaded and nobody asks for yet."""

    name: str
    patches: list[SparsePatch]
    base_digest: str


def empty_adapter(layout: Layout) -> dict[str, torch.Tensor]:
    """Zeroed tensors of a run's adapter, to replay a route onto."""
    return {
        name: torch.zeros(spec.shape, dtype=torch_type(spec.dtype))
        for name, spec in adapter_layout(layout).items()
    }


class PolicyAdapter:
    """The live adapter's tensors on this side, and the names that the child knows."""

    def __init__(
        self,
        client: VllmClient,
        tensors: Mapping[str, torch.Tensor],
        *,
        manifest: RunManifest,
        adapter: AdapterManifest,
        folder: Path,
    ) -> None:
        """`tensors` are taken over and hold the version that the child starts with."""
        self._client, self._folder = client, folder
        self._layout, self._adapter = Layout(manifest.tensors), adapter
        self._run_id = manifest.run_id
        self._live = LiveTensors(tensors.items(), adapter_layout(self._layout))
        self._loaded: dict[str, Path] = {}
        self._users: Counter[str] = Counter()
        self.name = ""
        """What new requests ask for."""

    async def load(self, version: PolicyVersion, digest: Digest) -> None:
        """Load the live tensors as the first version."""
        self.name = await self._load(version, digest, self._live)

    def read(self, objects: Objects, *, held: Digest) -> tuple[list[SparsePatch], Digest]:
        """The patches that lead to a route's end, verified. WeightsError; nothing changes."""
        return read_route(
            objects, run_id=self._run_id, layout=self._layout, live=self._live, held=held
        )

    async def stage(
        self, patches: list[SparsePatch], *, version: PolicyVersion, held: Digest, digest: Digest
    ) -> StagedAdapter:
        """Have the child load what the patches make of the live adapter."""
        after = await asyncio.to_thread(self._patched, patches)
        name = await self._load(version, digest, after)
        return StagedAdapter(name=name, patches=patches, base_digest=str(held))

    def _patched(self, patches: list[SparsePatch]) -> LiveTensors:
        """A copy of the live adapter with patches on it."""
        layout = self._live.layout
        copies = {
            name: tensor_of(bits.copy(), layout[name].dtype, layout[name].shape)
            for name, bits in self._live.named_bits()
        }
        after = LiveTensors(copies.items(), layout)
        scatter(after, patches)
        return after

    async def enter(self, staged: StagedAdapter) -> None:
        """From here on new requests ask for it."""
        scatter(self._live, staged.patches)
        self.name = staged.name
        await self._unload_unused()

    def digest_part(self) -> Digest:
        """What the live tensors add to the digest of the version."""
        return digest_part(self._live.named_bits(), self._layout)

    @asynccontextmanager
    async def used(self, name: str) -> AsyncIterator[None]:
        """Keep a version loaded for as long as the block lasts."""
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            await self._unload_unused()

    @property
    def loaded(self) -> Sequence[str]:
        """Names that the child knows, oldest first."""
        return tuple(self._loaded)

    async def _load(self, version: PolicyVersion, digest: Digest, tensors: LiveTensors) -> str:
        name = adapter_name(version)
        folder = self._folder / f"adapter-{name}"
        if name not in self._loaded:
            await asyncio.to_thread(self._write, folder, version, digest, tensors)
            await self._client.load_adapter(name, folder)
            self._loaded[name] = folder
        return name

    def _write(
        self, folder: Path, version: PolicyVersion, digest: Digest, tensors: LiveTensors
    ) -> None:
        """A folder as `peft` writes it."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        header = ObjectHeader(
            sparse=False, model_version=version, run_id=self._run_id, new_digest=str(digest)
        )
        write_adapter(
            tensors.named_bits(),
            header,
            folder / ADAPTER_WEIGHTS_FILE,
            layout=self._layout,
            adapter=self._adapter,
        )
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(self._adapter.peft_config()))

    async def _unload_unused(self) -> None:
        """Versions before the live one that no request uses."""
        names = list(self._loaded)
        older = names[: names.index(self.name)] if self.name in names else []
        for name in older:
            if not self._users[name] and (folder := self._loaded.pop(name, None)) is not None:
                try:
                    await self._client.unload_adapter(name)
                except EngineError as error:  # it only takes room, or the child has ended
                    log.warning(
                        "adapter not unloaded", extra={"adapter": name, "reason": str(error)}
                    )
                shutil.rmtree(folder, ignore_errors=True)
