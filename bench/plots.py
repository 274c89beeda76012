"""Pictures of bench/results: bits per change against the bound, times, growth."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SHOWN = ("seed", "seed+zstd", "slime", "pulse", "compact", "classes", "bound given exponents")


def main(results: Path) -> None:
    """Draw what has been measured."""
    if (results / "codec.json").exists():
        _bits(json.loads((results / "codec.json").read_text()), results / "codec.png")
    if (results / "speed.json").exists():
        _speed(json.loads((results / "speed.json").read_text()), results / "speed.png")
    if (results / "growth.json").exists():
        _growth(json.loads((results / "growth.json").read_text()), results / "growth.png")


def _bits(rows: list[dict[str, Any]], path: Path) -> None:
    recordings = sorted({row["recording"] for row in rows})
    figure, axes = plt.subplots(1, len(recordings), figsize=(5.5 * len(recordings), 4))
    for axis, recording in zip(axes, recordings, strict=True):
        mine = [row for row in rows if row["recording"] == recording]
        for encoding in SHOWN:
            points = [(r["step"], r["bits_per_change"]) for r in mine if r["encoding"] == encoding]
            if points:
                axis.plot(*zip(*points, strict=True), label=encoding)
        bound = sorted({(row["step"], row["bound_bits"]) for row in mine})
        axis.plot(*zip(*bound, strict=True), "k--", label="i.i.d. bound")
        axis.set(
            title=f"lr {mine[0]['lr']:g}", xlabel="step", ylabel="bits per change", yscale="log"
        )
        axis.set_yticks([8, 12, 16, 24, 32, 48], [8, 12, 16, 24, 32, 48])
        axis.minorticks_off()
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    _save(figure, path)


def _speed(tables: dict[str, Any], path: Path) -> None:
    shown = [key for key in tables if key.startswith("diff")]
    figure, axes = plt.subplots(len(shown), 1, figsize=(8, 2.1 * len(shown)))
    for axis, key in zip(axes, shown, strict=True):
        names = list(tables[key])
        axis.barh(names, [1000 * tables[key][name]["seconds"] for name in names])
        axis.invert_yaxis()
        axis.set(title=key, xlabel="ms")
    _save(figure, path)


def _growth(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    stages = ("read_s", "diff_s", "encode_s", "decode_s", "apply_s", "seed_diff_s")
    for axis, key, fixed in ((axes[0], "elements", "density"), (axes[1], "density", "elements")):
        common = max((row[fixed] for row in rows), key=[row[fixed] for row in rows].count)
        chosen = sorted(
            (row for row in rows if abs(row[fixed] / common - 1) < 0.1), key=lambda r: r[key]
        )
        for stage in stages:
            axis.plot([r[key] for r in chosen], [r[stage] for r in chosen], "o-", label=stage)
        axis.set(xlabel=key, ylabel="seconds, one thread", xscale="log", yscale="log")
    axes[0].legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    print(path)


if __name__ == "__main__":
    main(Path("bench/results"))
