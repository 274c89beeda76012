"""Peak memory of each stage on top of the weights, ours and the seed's, a process for each.

Writes bench/results/memory.json: extra bytes as a multiple of the dense bf16 model, by size.

    python -m bench.memory [ELEMENTS ...]    measures only these sizes anew
"""

import ctypes
import gc
import json
import multiprocessing
import resource
import sys
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

SIZES, DENSITY = (135_000_000, 500_000_000, 1_000_000_000), 0.005


def main(results: Path, wanted: list[str]) -> None:
    """Measure every stage at every size, each size put into the file when it is done."""
    results.mkdir(parents=True, exist_ok=True)
    file = results / "memory.json"
    for elements in [int(word) for word in wanted] or SIZES:
        print(f"{elements:.3g} weights, {DENSITY:.1%} changed; times the dense model")
        measured = {name: _measured(name, elements) for name in STAGES}
        table = json.loads(file.read_text()) if file.exists() else {"extra_over_dense": {}}
        table |= {"density": DENSITY}
        table["extra_over_dense"][str(elements)] = measured
        file.write_text(json.dumps(table, indent=1) + "\n")


def _measured(name: str, elements: int) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        extra = pool.apply(extra_of, (name, elements))
    print(f"  {name:<45} {extra:.3f}", flush=True)
    return round(extra, 3)


def extra_of(name: str, elements: int) -> float:
    """What a stage adds to the peak of this process, weights and their file in place, in sizes of
    the dense model."""
    torch.set_num_threads(1)
    small = synthetic_step(40_000_000, DENSITY)
    STAGES[name](small)()  # compiles, and loads what it needs
    step = synthetic_step(elements, DENSITY)
    work = STAGES[name](step)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the small step left free would be used again, unseen
    before = _resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    work()
    return (_peak_bytes() - before) / step.base.layout.nbytes


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
    main(Path("bench/results"), sys.argv[1:])
