"""How chains and deltas are shown: tables on the terminal, density by layer as a picture."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deltawire.codec.inspect import STEP_BOUNDS, TensorChanges, histogram
from deltawire.protocol.chain import Head, Link
from deltawire.protocol.header import ObjectHeader
from deltawire.sync.needs import in_words, needed_by

_LAYER = re.compile(r"\.(\d+)\.")


def show_chain(head: Head, *, console: Console | None = None) -> None:
    """One row a link, and the total."""
    needs = needed_by(head)
    now_s = time.time()
    table = Table(title=f"run {head.run_id or '(flat)'}: version {head.version}, {head.state}")
    for name in ("version", "kind", "base", "encoding", "bytes", "density", "age", "needed by"):
        table.add_column(name, justify="right" if name in ("bytes", "density", "age") else "left")
    for link in head.links:
        table.add_row(
            str(link.version),
            str(link.kind),
            "" if link.base_version is None else str(link.base_version),
            link.encoding,
            f"{link.bytes:,}",
            _density(link),
            _age(now_s - link.created_at),
            in_words(needs[link.key]),
        )
    out = console or Console()
    out.print(table)
    out.print(f"{len(head.links)} objects, {sum(link.bytes for link in head.links):,} bytes")


def show_changes(
    header: ObjectHeader, tensors: Sequence[TensorChanges], *, console: Console | None = None
) -> None:
    """What the file says of itself, one row a tensor, and how far weights moved."""
    out = console or Console()
    base = "" if header.base_version is None else f" on version {header.base_version}"
    out.print(
        f"version {header.model_version}{base}, {header.encoding}: {header.num_changed:,} of "
        f"{header.total_elements:,} elements ({header.density:.4%})"
    )
    if not tensors:
        return
    table = Table()
    for name in ("tensor", "changes", "density", *_bars()):
        table.add_column(name, justify="left" if name == "tensor" else "right")
    for tensor in tensors:
        table.add_row(
            tensor.name,
            f"{tensor.changed:,}",
            f"{tensor.density:.4%}",
            *_shares(tensor.steps),
        )
    table.add_section()
    table.add_row(
        "all", f"{header.num_changed:,}", f"{header.density:.4%}", *_shares(histogram(tensors))
    )
    out.print(table)


def plot_density(header: ObjectHeader, tensors: Sequence[TensorChanges], path: Path) -> None:
    """A PNG: share of each layer's elements that changed; tensors outside layers by name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    densities = density_by_layer(tensors)
    figure = Figure(figsize=(max(6.0, 0.25 * len(densities)), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar(range(len(densities)), [100 * density for density in densities.values()])
    axes.set_xticks(range(len(densities)), list(densities), rotation=90, fontsize=7)
    axes.set_ylabel("changed elements (%)")
    axes.set_title(f"version {header.model_version}: {header.density:.3%} changed")
    figure.savefig(path, format="png", dpi=120)


def density_by_layer(tensors: Sequence[TensorChanges]) -> dict[str, float]:
    """``{"embed_tokens": 0.001, "0": 0.004, "1": ...}`` in order of appearance."""
    changed: dict[str, int] = {}
    elements: dict[str, int] = {}
    for tensor in tensors:
        layer = _LAYER.search(tensor.name)
        name = layer[1] if layer else tensor.name.removesuffix(".weight").split(".")[-1]
        changed[name] = changed.get(name, 0) + tensor.changed
        elements[name] = elements.get(name, 0) + tensor.elements
    return {name: changed[name] / elements[name] for name in changed if elements[name]}


def _bars() -> list[str]:
    """``±1, ±2, ±3-4, ... , far``: the histogram's heads, in units in the last place."""
    lows = [1, *(bound + 1 for bound in STEP_BOUNDS[:-1])]
    heads = [
        f"±{low}" if low == high else f"±{low}-{high}"
        for low, high in zip(lows, STEP_BOUNDS, strict=True)
    ]
    return [*heads, "far"]


def _shares(steps: tuple[int, ...] | None) -> list[str]:
    if steps is None:
        return ["?"] * (len(STEP_BOUNDS) + 1)
    total = sum(steps) or 1
    return [f"{count / total:.1%}" if count else "" for count in steps]


def _density(link: Link) -> str:
    if link.base_version is None or not link.total or link.changed is None:
        return ""
    return f"{link.changed / link.total:.4%}"


def _age(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
