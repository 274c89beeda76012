"""LoRA adapters of a vLLM child: each version under a name of its own, old ones unloaded.

A name is never loaded twice with other weights: vLLM keys its prefix cache by it, and a request
that names a version can only be answered by that version.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path

from safetensors import safe_open

from deltawire.protocol.errors import MalformedObject
from deltawire_inference.engines.vllm.client import VllmClient

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG_KEY = "adapter_config"
"""Metadata of a single-file adapter: PEFT's configuration as JSON."""


class Adapters:
    """At most `limit` adapters, the newest ones."""

    def __init__(self, client: VllmClient, folder: Path, *, limit: int) -> None:
        self._client, self._folder, self._limit = client, folder, limit
        self._loaded: OrderedDict[str, Path] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that can be asked for, oldest first."""
        return tuple(self._loaded)

    async def load(self, name: str, path: Path) -> None:
        """Load an adapter (a PEFT folder, or one file with its configuration in the metadata).

        Raises:
            MalformedObject: Not an adapter.
            EngineError: vLLM refused it (rank too high, unknown modules).
        """
        if name in self._loaded:
            return
        folder = peft_folder(path, self._folder / f"adapter-{name}")
        await self._client.load_adapter(name, folder)
        self._loaded[name] = folder
        while len(self._loaded) > self._limit:
            oldest, its_folder = self._loaded.popitem(last=False)
            await self._client.unload_adapter(oldest)
            if its_folder.is_relative_to(self._folder):
                shutil.rmtree(its_folder, ignore_errors=True)


def peft_folder(path: Path, target: Path) -> Path:
    """A folder as `peft` writes it, made around a single file where that is what we have.

    Raises:
        MalformedObject: The file carries no adapter configuration.
    """
    if path.is_dir():
        return path
    with safe_open(str(path), framework="numpy") as file:
        config = (file.metadata() or {}).get(CONFIG_KEY)
    if config is None or not isinstance(json.loads(config), dict):
        raise MalformedObject(
            f"{path.name}: expected PEFT's configuration under the metadata key {CONFIG_KEY!r}"
        )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / CONFIG).write_text(config)
    try:
        os.link(path, target / WEIGHTS)
    except OSError:  # another file system
        shutil.copyfile(path, target / WEIGHTS)
    return target
