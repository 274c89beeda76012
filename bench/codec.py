"""Bytes on the wire: every encoding on every recorded GRPO step, beside the entropy bound.

Writes bench/results/codec.json: one row for each encoding, recording and step. A run that is cut
short goes on where it was, as long as the code is the same.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench import rivals
from bench.deltas import Step, recorded_steps
from bench.record import RECIPES, Recipe, recorded
from deltawire.codec import compact
from deltawire.codec.bits import BitArray
from deltawire.codec.decode import decode_delta
from deltawire.codec.encode import Encoding, encode_delta

OURS: tuple[Encoding, ...] = ("seed", "compact", "classes")
RIVALS = {"seed+zstd": rivals.seed_zstd, "pulse": rivals.pulse, "slime": rivals.slime}
_DENSE, _DENSE_EVERY = ("slime",), 4
"""What walks all weights is measured on every fourth step."""
_SIZE_MODULES = (
    "classes",
    "compact",
    "container",
    "positions",
    "seed",
    "segment_file",
    "segments",
    "values",
)
Row = dict[str, str | int | float]


def main(cache: Path, results: Path) -> None:
    """Measure everything and write the file."""
    rows: list[Row] = []
    for recipe in RECIPES:
        folder = recorded(recipe, cache)
        done = cache / "rows" / _source_digest() / recipe.name
        done.mkdir(parents=True, exist_ok=True)
        for step in recorded_steps(folder):
            rows += _kept_rows(step, recipe, done / f"{step.number:03d}.json")
        _print_means(recipe, rows)
    results.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    (results / "codec.json").write_text(f"[\n{lines}\n]\n")


def _kept_rows(step: Step, recipe: Recipe, kept: Path) -> list[Row]:
    if not kept.exists():
        kept.write_text(json.dumps(list(_rows(step, recipe))))
    found: list[Row] = json.loads(kept.read_text())
    return found


def _source_digest() -> str:
    """Of the code that decides sizes: rows of other code are measured anew."""
    sources = [Path(__file__), Path(__file__).with_name("rivals.py")]
    sources += [Path(compact.__file__).with_name(f"{name}.py") for name in _SIZE_MODULES]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _rows(step: Step, recipe: Recipe) -> Iterator[Row]:
    about: Row = {
        "recording": recipe.name,
        "lr": recipe.lr,
        "step": step.number,
        "changes": int(step.indices.size),
        "elements": step.base.layout.total_elements,
        "bound_bits": round(iid_bound_bits(step), 4),
    }
    patches = step.patches()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        for encoding in OURS:
            begun = time.perf_counter()
            report = encode_delta(
                patches,
                step.header(),
                path,
                layout=step.base.layout,
                encoding=encoding,
                base=step.base,
            )
            seconds = time.perf_counter() - begun
            _check_round_trip(path, step)
            yield about | _result(report.encoding, report.bytes, seconds, step)
    for name, encode in RIVALS.items():
        if name in _DENSE and step.number % _DENSE_EVERY != 1:
            continue
        begun = time.perf_counter()
        size = encode(step)
        yield about | _result(name, size, time.perf_counter() - begun, step)
    if step.number % _DENSE_EVERY == 1:
        size = class_bound_bits(step) * step.indices.size / 8
        yield about | _result("bound given exponents", size, 0.0, step)


def _result(encoding: str, size: float, seconds: float, step: Step) -> Row:
    return {
        "encoding": encoding,
        "bytes": int(size),
        "bits_per_change": round(8 * size / step.indices.size, 4),
        "seconds": round(seconds, 5),
    }


def _check_round_trip(path: Path, step: Step) -> None:
    found = decode_delta(path, step.base.layout, step.base)
    indices = [p.indices + np.int64(step.base.layout[p.name].offset) for p in found]
    assert np.array_equal(np.concatenate(indices), step.indices)
    assert np.array_equal(np.concatenate([p.values for p in found]), step.values)


def iid_bound_bits(step: Step) -> float:
    """Bits a change: n H(m/n) / m for independent positions, plus the entropy of steps."""
    return float(binary_entropy(step.density) / step.density) + entropy_bits(_steps(step))


def class_bound_bits(step: Step) -> float:
    """The same when the exponent of each old value is known: positions and steps given it."""
    all_classes = np.bincount((step.base.flat >> 7) & 0xFF, minlength=256)
    classes = (step.old >> 7) & 0xFF
    changed = np.bincount(classes, minlength=256)
    steps = _steps(step)
    bits = 0.0
    for c in np.flatnonzero(changed):
        share = changed[c] / all_classes[c]
        bits += float(all_classes[c] * binary_entropy(share))
        bits += float(changed[c] * entropy_bits(steps[classes == c]))
    return bits / step.indices.size


def binary_entropy(p: float) -> float:
    """H(p) in bits."""
    return 0.0 if p in (0.0, 1.0) else float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def entropy_bits(symbols: BitArray) -> float:
    """Empirical entropy of a list of symbols, bits each."""
    share = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(share * np.log2(share)).sum())


def _steps(step: Step) -> BitArray:
    """Units on the float line between old and new."""
    wide = [np.where(b >= 0x8000, 0xFFFF - b.astype(np.int64), b + np.int64(0x8000))
            for b in (step.old, step.values)]  # fmt: skip
    return wide[1] - wide[0]


def _print_means(recipe: Recipe, rows: list[Row]) -> None:
    mine = [row for row in rows if row["recording"] == recipe.name]
    bound = sum(float(row["bound_bits"]) * float(row["changes"]) for row in mine)
    changes = sum(float(row["changes"]) for row in mine)
    print(f"\n{recipe.name}: entropy bound {bound / changes:.2f} bits a change")
    for encoding in dict.fromkeys(row["encoding"] for row in mine):
        chosen = [row for row in mine if row["encoding"] == encoding]
        total = sum(float(row["changes"]) for row in chosen)
        bits = 8 * sum(float(row["bytes"]) for row in chosen) / total
        over = bits / (bound / changes) - 1
        print(f"  {encoding:<22} {bits:6.2f} bits a change   {over:+8.1%} against the bound")


if __name__ == "__main__":
    main(Path(".cache/bench"), Path("bench/results"))
