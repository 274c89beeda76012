"""Diff, encode, decode and digest against the seed's method and a read-only memory pass.

Writes bench/results/speed.json. One thread each; contenders take turns and the least CPU time of
each counts, so only ratios within one table mean anything. A diff is measured on the first step of
a recording, its densest, and on the last; its yardstick reads what a diff must look at, weights
and published bits, and nothing else. Every contender begins with other memory in the caches and
with the same lines of the published bits written shortly before, as an optimizer leaves memory.
"""

import json
import sys
import zlib
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numba import njit

from bench import seed_method
from bench.deltas import FlatWeights, Step, recorded_steps
from bench.record import RECIPES, recorded
from bench.timing import best_seconds
from deltawire.codec import kernels
from deltawire.codec.apply import LiveTensors
from deltawire.codec.bits import bits_of
from deltawire.codec.decode import decode_delta
from deltawire.codec.diff import Shadow
from deltawire.codec.digest import digest_full
from deltawire.codec.encode import Encoding, encode_delta

Table = dict[str, dict[str, float | str]]
_OTHER_BYTES = 1 << 29
"""Read ahead of each diff, off the clock: no contender finds its bytes in a cache."""


def main(cache: Path, results: Path, wanted: list[str]) -> None:
    """Measure the wanted tables (default: all) and put them into the file."""
    torch.set_num_threads(1)
    results.mkdir(parents=True, exist_ok=True)
    file = results / "speed.json"
    for recipe in RECIPES:
        steps = recorded_steps(recorded(recipe, cache))
        for step in islice(steps, 0, recipe.steps, recipe.steps - 1):
            for name, measure in TABLES.items():
                if (not wanted or name in wanted) and (name in DIFFS or step.number > 1):
                    title = f"{name}, lr {recipe.lr:g}, {step.density:.2%} changed"
                    _put(file, title, shown(title, measure(step)))


def _put(file: Path, title: str, table: "Table") -> None:
    tables = json.loads(file.read_text()) if file.exists() else {}
    tables[title] = table
    file.write_text(json.dumps(dict(sorted(tables.items())), indent=1) + "\n")


def diff_bf16(step: Step, *, rounds: int = 12) -> Table:
    """A bf16 model against its published bits; yardstick: reading both once."""
    after = _after(step)
    tensors = after.named_tensors(torch.bfloat16)
    old = step.base.named_tensors(torch.bfloat16)
    shadow = Shadow.of(old, step.base.layout)
    plain = Shadow.of(old, step.base.layout, loops=kernels.load(compiled=False))

    other = np.ones(_OTHER_BYTES // 8, np.uint64)

    def same_start() -> None:
        shadow.rollback()
        plain.rollback()
        _leave_as_a_diff_does(shadow, tensors)
        _sum_words(other)

    times = best_seconds(
        {
            "read both once": lambda: read(after.flat, step.base.flat),
            "read the weights once": lambda: _read_one(after.flat),
            "deltawire": lambda: shadow.diff(tensors),
            "deltawire, numpy only": lambda: plain.diff(tensors),
            "torch int16 compare and nonzero": lambda: _torch_compare(tensors, old),
            "seed (clone, compare, nonzero)": lambda: seed_method.detect(
                tensors, seed_method.snapshot(old)
            ),
        },
        rounds=rounds,
        before=same_start,
    )
    return against(times, yardstick="read both once")


def diff_fp32(step: Step, *, rounds: int = 5) -> Table:
    """fp32 masters, rounded in passing."""
    masters = _after(step).named_tensors(torch.float32)
    old = step.base.named_tensors(torch.float32)
    flat = [bits_of(tensor) for _, tensor in masters]
    shadow = Shadow.of(step.base.named_tensors(torch.bfloat16), step.base.layout)

    other = np.ones(_OTHER_BYTES // 8, np.uint64)

    def same_start() -> None:
        shadow.rollback()
        _leave_as_a_diff_does(shadow, masters)
        _sum_words(other)

    def read_all() -> None:
        for (_, kept), master in zip(step.base.named_bits(), flat, strict=True):
            _read_one(master)
            _read_one(kept)

    times = best_seconds(
        {
            "read both once": read_all,
            "deltawire": lambda: shadow.diff(masters),
            "torch cast alone": lambda: [t.to(torch.bfloat16) for _, t in masters],
            "seed (cast, clone, compare, nonzero)": lambda: seed_method.detect(
                masters, seed_method.snapshot(old)
            ),
        },
        rounds=rounds,
        before=same_start,
    )
    return against(times, yardstick="read both once")


def coding(step: Step, *, rounds: int = 9) -> Table:
    """Million changes a second, file included, one thread."""
    patches, layout = step.patches(), step.base.layout
    encodings: tuple[Encoding, ...] = ("seed", "compact", "classes")
    with TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in encodings}

        def encode(name: Encoding) -> Callable[[], object]:
            return lambda: encode_delta(
                patches, step.header(), paths[name], layout=layout, encoding=name, base=step.base
            )

        times = best_seconds({f"encode {n}": encode(n) for n in encodings}, rounds=rounds)
        times |= best_seconds(
            {f"decode {n}": _decoding(paths[n], step) for n in encodings}, rounds=rounds
        )
    return {
        name: {"seconds": seconds, "changes_per_s": step.indices.size / seconds}
        for name, seconds in times.items()
    }


def digests(step: Step, *, rounds: int = 5) -> Table:
    """Over every weight, and over the changes only."""
    patches, layout = step.patches(), step.base.layout
    start = digest_full(step.base.named_bits(), layout)
    flat = step.base.flat
    times = best_seconds(
        {
            "read all once": lambda: _read_one(flat),
            "digest, changes only": lambda: start.updated(patches, layout),
            "digest, all weights": lambda: digest_full(step.base.named_bits(), layout),
            "crc32 (zlib), all weights": lambda: zlib.crc32(flat),
        },
        rounds=rounds,
    )
    return against(times, yardstick="read all once")


def _leave_as_a_diff_does(shadow: Shadow, tensors) -> None:  # type: ignore[no-untyped-def]
    """Written lines that memory has not got yet slow down whoever comes next: let all find them."""
    shadow.diff(tensors)
    shadow.rollback()


def _decoding(path: Path, step: Step) -> Callable[[], object]:
    """As a replica does it: old values come from its live tensors."""
    live = LiveTensors(step.base.named_tensors(torch.bfloat16), step.base.layout)
    return lambda: decode_delta(path, step.base.layout, live)


def _after(step: Step) -> FlatWeights:
    flat = step.base.flat.copy()
    flat[step.indices] = step.values
    return FlatWeights(step.base.layout, flat)


@njit(nogil=True)
def _read_words(a, b):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(a.size):
        total += a[i] ^ b[i]
    return total


def read(a, b) -> int:  # type: ignore[no-untyped-def]
    """Both arrays, once, as fast as one thread can."""
    return int(_read_words(_words(a), _words(b)))


@njit(nogil=True)
def _sum_words(a):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(a.size):
        total += a[i]
    return total


def _read_one(a) -> int:  # type: ignore[no-untyped-def]
    return int(_sum_words(_words(a)))


def _words(a):  # type: ignore[no-untyped-def]
    return a[: a.size * a.itemsize // 8 * 8 // a.itemsize].view(np.uint64)


def _torch_compare(tensors, old) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    return [
        (new.view(torch.int16) != kept.view(torch.int16)).view(-1).nonzero()
        for (_, new), (_, kept) in zip(tensors, old, strict=True)
    ]


def against(times: Mapping[str, float], *, yardstick: str) -> Table:
    return {
        name: {"seconds": round(t, 5), "times_yardstick": round(t / times[yardstick], 3)}
        for name, t in times.items()
    }


def shown(title: str, table: Table) -> Table:
    print(f"\n{title}")
    for name, row in table.items():
        print("  " + f"{name:<40}" + "   ".join(f"{k} {v:.4g}" for k, v in row.items()))
    return table


DIFFS = ("diff bf16", "diff fp32")
TABLES: dict[str, Callable[[Step], Table]] = {
    "diff bf16": diff_bf16,
    "diff fp32": diff_fp32,
    "codec": coding,
    "digest": digests,
}


if __name__ == "__main__":
    main(Path(".cache/bench"), Path("bench/results"), sys.argv[1:])
