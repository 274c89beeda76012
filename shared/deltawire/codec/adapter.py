"""A whole LoRA adapter in one file that `peft` opens: plain tensors under PEFT's keys, PEFT's
configuration in the metadata. For a replica it is a delta that goes onto any version of its run."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from deltawire.codec.bits import BitArray
from deltawire.codec.container import Container, Section, aligned, write_container
from deltawire.codec.patch import Layout, OldValues, SparsePatch
from deltawire.protocol.adapters import (
    ADAPTER_CONFIG_KEY,
    ADAPTER_ENCODING,
    AdapterManifest,
    adapter_key,
    adapter_part,
)
from deltawire.protocol.errors import LayoutMismatch
from deltawire.protocol.header import ObjectHeader


def adapter_layout(layout: Layout) -> Layout:
    """The adapter's tensors alone, in order. Positions of the run's digest stay with `layout`."""
    return Layout(spec for spec in layout.specs if adapter_part(spec.name) is not None)


def base_layout(layout: Layout) -> Layout:
    """The base model's tensors alone. They come first, so their positions are the run's."""
    return Layout(spec for spec in layout.specs if adapter_part(spec.name) is None)


def check_adapter(layout: Layout, adapter: AdapterManifest) -> None:
    """Raise LayoutMismatch unless each adapted layer has both halves, of the rank and of shapes
    that fit its weight."""
    part = adapter_layout(layout)
    modules = {found.module for name in part if (found := adapter_part(name)) is not None}
    if not modules:
        raise LayoutMismatch("a LoRA run without a tensor of an adapter")
    for module in sorted(modules):
        weight = layout[f"{module}.weight"]
        down, up = layout[adapter_key(module, "A")], layout[adapter_key(module, "B")]
        fits = len(weight.shape) == 2 and (down.shape, up.shape) == (
            (adapter.rank, weight.shape[1]),
            (weight.shape[0], adapter.rank),
        )
        if not fits:
            raise LayoutMismatch(
                f"{module}: an adapter of rank {adapter.rank} with shapes {down.shape} and "
                f"{up.shape} does not fit a weight of shape {weight.shape}"
            )


def write_adapter(
    named_bits: Iterable[tuple[str, BitArray]],
    header: ObjectHeader,
    path: Path,
    *,
    layout: Layout,
    adapter: AdapterManifest,
) -> ObjectHeader:
    """Write one file and return its header. LayoutMismatch unless it is the whole adapter."""
    part, bits = adapter_layout(layout), dict(named_bits)
    if bits.keys() != set(part):
        raise LayoutMismatch(f"an adapter has all of {len(part)} tensors, {len(bits)} were given")
    sections = [
        Section(name=name, dtype=part[name].dtype, shape=part[name].shape, pieces=[bits[name]])
        for name in part
    ]
    full = header.model_copy(
        update={
            "sparse": False,
            "base_version": None,
            "base_digest": "",
            "encoding": ADAPTER_ENCODING,
            "num_changed": part.total_elements,
            "total_elements": layout.total_elements,
            "changed_params": [],
            "layout_digest": layout.digest,
        }
    )
    config = json.dumps(adapter.peft_config())
    write_container(path, aligned(sections), full.to_metadata() | {ADAPTER_CONFIG_KEY: config})
    return full


def read_adapter(container: Container, layout: Layout, old: OldValues | None) -> list[SparsePatch]:
    """Its patches in layout order: with `old` only what differs, else every element.

    Raises LayoutMismatch unless the file holds exactly the adapter of this layout.
    """
    part = adapter_layout(layout)
    if container.entries.keys() != set(part):
        odd = sorted(container.entries.keys() ^ set(part))
        raise LayoutMismatch(
            f"{container.name}: {len(odd)} tensors missing or not of this run's adapter: {odd[:4]}"
        )
    for name, entry in container.entries.items():
        if (entry.dtype, entry.shape) != (part[name].dtype, part[name].shape):
            raise LayoutMismatch(
                f"{container.name}: {name} should be {part[name].dtype} {part[name].shape} in "
                f"this run, found {entry.dtype} {entry.shape}"
            )
    return list(_patches(container, part, old))


def _patches(container: Container, part: Layout, old: OldValues | None) -> Iterator[SparsePatch]:
    for tensor in part.values():
        bits = container.read(tensor.name)
        if old is None:
            indices = np.arange(tensor.numel, dtype=tensor.index_type)
            yield SparsePatch(name=tensor.name, indices=indices, values=bits)
            continue
        now = old.read(tensor.name, 0, tensor.numel)
        indices = np.flatnonzero(bits != now).astype(tensor.index_type)
        if indices.size:
            yield SparsePatch(
                name=tensor.name, indices=indices, values=bits[indices], old=now[indices]
            )
