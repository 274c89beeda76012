"""A route of fetched objects -> a local checkpoint that vLLM can load.

The weights file is mapped while the route is replayed onto it, so that even a chain of deltas needs
no model in this process's own memory; its digest is the one the chain announced.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from deltawire.codec.adapter import base_layout
from deltawire.codec.apply import LiveTensors
from deltawire.codec.bits import tensor_of
from deltawire.codec.container import Section, aligned, header_bytes
from deltawire.codec.digest import Digest
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import RunManifest
from deltawire.sync.replay import replay
from deltawire_inference.engines.route import Objects

WEIGHTS = "model.safetensors"


def write_checkpoint(
    model_dir: Path,
    objects: Objects,
    *,
    manifest: RunManifest,
    target: Path,
    adapter: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Digest:
    """Merge a route that begins with an anchor into `target`; returns the digest there.

    Of a LoRA run the base stands in `target`, and the tensors of `adapter` are filled.

    Raises:
        WeightsError: An object is not what its link promised; `target` is then removed.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model_dir, target)
    try:
        layout = Layout(manifest.tensors)
        named, mapped = _create(target / WEIGHTS, base_layout(layout) if adapter else layout)
        tensors = LiveTensors((named | dict(adapter)).items(), layout)
        digest = replay(objects, tensors, run_id=manifest.run_id)
        mapped.flush()
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return digest


def _create(
    path: Path, layout: Layout
) -> tuple[dict[str, torch.Tensor], np.memmap[tuple[int], np.dtype[np.uint8]]]:
    """An empty safetensors file of the layout, and its tensors over the mapped file."""
    sections = aligned(
        [Section(name=n, dtype=layout[n].dtype, shape=layout[n].shape, pieces=()) for n in layout]
    )
    header = header_bytes(sections, {"format": "pt"})
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(len(header) + layout.nbytes)
    mapped = np.memmap(path, dtype=np.uint8, mode="r+", offset=0)
    tensors: dict[str, torch.Tensor] = {}
    begin = len(header)
    for section in sections:
        bits = mapped[begin : begin + section.nbytes].view(layout[section.name].bits)
        tensors[section.name] = tensor_of(bits, section.dtype, section.shape)
        begin += section.nbytes
    return tensors, mapped
