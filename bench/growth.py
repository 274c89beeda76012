"""How time and bytes grow with the model and with the density of a delta. Synthetic weights.

Writes bench/results/growth.json: rows of elements, density, and seconds of each stage on one
thread, with the seed's detection and a read-only pass beside ours.

    python -m bench.growth [POINT ...]    measures only these points (0, 1, ...) anew
"""

import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench import seed_method
from bench.deltas import FlatWeights, Step, synthetic_step
from bench.speed import read
from bench.timing import best_seconds
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.decode import decode_delta
from deltawire.codec.diff import Shadow
from deltawire.codec.encode import encode_delta

POINTS = (
    *((elements, 0.005) for elements in (135_000_000, 500_000_000, 1_000_000_000)),
    *((135_000_000, density) for density in (0.0005, 0.002, 0.02, 0.1)),
)
Row = dict[str, float]


def main(results: Path, wanted: list[str]) -> None:
    """Measure the points, each put into the file when it is done."""
    torch.set_num_threads(1)
    results.mkdir(parents=True, exist_ok=True)
    file = results / "growth.json"
    for number in [int(word) for word in wanted] or range(len(POINTS)):
        row = {"point": number} | _row(synthetic_step(*POINTS[number]))
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        old: list[Row] = json.loads(file.read_text()) if file.exists() else []
        rows = [*(kept for kept in old if kept["point"] != number), row]
        lines = ",\n".join(json.dumps(r) for r in sorted(rows, key=lambda r: r["point"]))
        file.write_text(f"[\n{lines}\n]\n")
        gc.collect()


def _row(step: Step) -> Row:
    layout, patches = step.base.layout, step.patches()
    before = step.base.named_tensors(torch.bfloat16)
    shadow = Shadow.of(before, layout)
    after = FlatWeights(layout, step.base.flat.copy())
    after.flat[step.indices] = step.values
    tensors = after.named_tensors(torch.bfloat16)
    live = LiveTensors(tensors, layout)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "delta"

        def encode() -> int:
            return encode_delta(
                patches, step.header(), path, layout=layout, encoding="compact", base=step.base
            ).bytes

        size = encode()
        times = best_seconds(
            {
                "read_s": lambda: read(after.flat, step.base.flat),
                "diff_s": lambda: shadow.diff(tensors),
                "encode_s": encode,
                "decode_s": lambda: decode_delta(path, layout, step.base),
                "apply_s": lambda: scatter(live, patches),
                "seed_diff_s": lambda: seed_method.detect(tensors, seed_method.snapshot(before)),
            },
            rounds=5,
            before=shadow.rollback,
        )
    counts = {"elements": layout.total_elements, "density": step.density, "bytes": size}
    return counts | {name: round(seconds, 5) for name, seconds in times.items()}


if __name__ == "__main__":
    main(Path("bench/results"), sys.argv[1:])
