"""What stands inside the pause, at a billion weights: our scatter, the seed's snapshot and reload.

Writes bench/results/apply.json.
"""

import json
from pathlib import Path

import numpy as np
import torch

from bench import seed_method
from bench.deltas import synthetic_step
from bench.speed import Table, against, shown
from bench.timing import best_seconds
from deltawire.codec.apply import LiveTensors, gather, scatter
from deltawire.codec.patch import SparsePatch

ELEMENTS, DENSITY = 1_000_000_000, 0.006


def main(results: Path) -> None:
    """Measure and write the file."""
    torch.set_num_threads(1)
    table = shown(f"apply, {ELEMENTS:.0e} elements, {DENSITY:.1%} changed", apply_in_place())
    results.mkdir(parents=True, exist_ok=True)
    about = {"elements": ELEMENTS, "density": DENSITY, "apply": table}
    (results / "apply.json").write_text(json.dumps(about, indent=1) + "\n")


def apply_in_place(*, rounds: int = 3) -> Table:
    """Ours is the scatter; the seed's updates its snapshot and loads changed tensors whole."""
    step = synthetic_step(ELEMENTS, DENSITY)
    live = step.base.named_tensors(torch.bfloat16)
    tensors = LiveTensors(live, step.base.layout)
    patches = step.patches()
    bare = [SparsePatch(name=p.name, indices=p.indices, values=p.values) for p in patches]
    numbers = {name: number for number, (name, _) in enumerate(live)}
    changes = [
        (
            numbers[p.name],
            torch.from_numpy(p.indices),
            torch.from_numpy(p.values.view(np.int16)).view(torch.bfloat16),
        )
        for p in patches
    ]
    kept = [tensor.clone() for _, tensor in live]
    flat = [tensor.view(-1) for _, tensor in live]

    def index_copy() -> None:
        for number, indices, values in changes:
            flat[number].index_copy_(0, indices.long(), values)

    times = best_seconds(
        {
            "deltawire scatter": lambda: scatter(tensors, patches),
            "deltawire gather (before the pause)": lambda: gather(tensors, bare),
            "torch index_copy_": index_copy,
            "seed (snapshot and reload)": lambda: seed_method.apply(live, kept, changes),
        },
        rounds=rounds,
    )
    return against(times, yardstick="deltawire scatter")


if __name__ == "__main__":
    main(Path("bench/results"))
