"""Peak memory of each stage on top of the weights, ours and the seed's, a process for each.

Writes bench/results/memory.json: extra bytes as a multiple of the dense bf16 model.
"""

import gc
import json
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench import seed_method
from bench.deltas import FlatWeights, Step, synthetic_step
from deltawire.codec.anchor import write_anchor
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.decode import decode_delta
from deltawire.codec.diff import Shadow
from deltawire.codec.encode import encode_delta

ELEMENTS, DENSITY = 500_000_000, 0.005


def main(results: Path) -> None:
    """Measure every stage and write the file."""
    context = multiprocessing.get_context("spawn")
    measured: dict[str, float] = {}
    for name in STAGES:
        with context.Pool(1) as pool:
            measured[name] = round(pool.apply(extra_of, (name,)) / (2 * ELEMENTS), 3)
        print(f"{name:<45} {measured[name]:.3f} x the dense model", flush=True)
    results.mkdir(parents=True, exist_ok=True)
    table = {"elements": ELEMENTS, "density": DENSITY, "extra_over_dense": measured}
    (results / "memory.json").write_text(json.dumps(table, indent=1) + "\n")


def extra_of(name: str) -> int:
    """Bytes that a stage adds to the peak of this process, weights and their file in place."""
    torch.set_num_threads(1)
    small = synthetic_step(40_000_000, DENSITY)
    STAGES[name](small)()  # compiles, and loads what it needs
    work = STAGES[name](synthetic_step(ELEMENTS, DENSITY))
    gc.collect()
    before = _resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    work()
    return _peak_bytes() - before


def _diff(step: Step) -> Callable[[], object]:
    """Its shadow, the published bits, counts as extra: it is made inside."""
    tensors = _after(step).named_tensors(torch.bfloat16)

    def run() -> object:
        return Shadow.of(tensors, step.base.layout).diff(tensors)

    return run


def _seed_diff(step: Step) -> Callable[[], object]:
    before = step.base.named_tensors(torch.bfloat16)
    after = _after(step).named_tensors(torch.bfloat16)
    return lambda: seed_method.detect(after, seed_method.snapshot(before))


def _encode(step: Step) -> Callable[[], object]:
    patches = step.patches()
    return lambda: _written(step, patches)


def _written(step: Step, patches) -> None:  # type: ignore[no-untyped-def]
    with TemporaryDirectory() as folder:
        encode_delta(
            patches, step.header(), Path(folder) / "d", layout=step.base.layout, encoding="compact"
        )


def _decode(step: Step) -> Callable[[], object]:
    folder = TemporaryDirectory()
    path = Path(folder.name) / "d"
    encode_delta(step.patches(), step.header(), path, layout=step.base.layout, encoding="compact")

    def run() -> object:
        with folder:
            return decode_delta(path, step.base.layout, step.base)

    return run


def _apply(step: Step) -> Callable[[], object]:
    live = LiveTensors(step.base.named_tensors(torch.bfloat16), step.base.layout)
    patches = step.patches()
    return lambda: scatter(live, patches)


def _seed_apply(step: Step) -> Callable[[], object]:
    """Its snapshot counts as extra: it is made inside."""
    live = step.base.named_tensors(torch.bfloat16)
    found = seed_method.detect(
        _after(step).named_tensors(torch.bfloat16), seed_method.snapshot(live)
    )
    return lambda: seed_method.apply(live, [tensor.clone() for _, tensor in live], found)


def _packed_anchor(step: Step) -> Callable[[], object]:
    def run() -> None:
        with TemporaryDirectory() as folder:
            write_anchor(
                step.base.named_bits(),
                step.header(),
                Path(folder) / "a",
                layout=step.base.layout,
                packed=True,
            )

    return run


def _after(step: Step) -> FlatWeights:
    flat = step.base.flat.copy()
    flat[step.indices] = step.values
    return FlatWeights(step.base.layout, flat)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


STAGES: dict[str, Callable[[Step], Callable[[], object]]] = {
    "diff, published bits included": _diff,
    "seed: snapshot and compare": _seed_diff,
    "encode compact": _encode,
    "decode compact": _decode,
    "apply": _apply,
    "seed: snapshot and reload": _seed_apply,
    "packed anchor": _packed_anchor,
}


if __name__ == "__main__":
    main(Path("bench/results"))
