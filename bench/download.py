"""What a replica that is up to date downloads for each step: the seed's scheme and ours.

The seed's chain holds a full checkpoint at every tenth step in place of a delta, so every replica
loads it; ours is deltas alone, and the anchors beside them are for who joins or is behind. Both
from the bytes of recorded steps in bench/results/codec.json. Writes bench/results/download.json.
"""

import json
from pathlib import Path
from typing import Any

ANCHOR_EVERY = 10
"""The seed's."""
BYTES_PER_WEIGHT = 2
Row = dict[str, Any]


def main(results: Path) -> None:
    """Compute and write the file."""
    rows: list[Row] = json.loads((results / "codec.json").read_text())
    tables = [_table([r for r in rows if r["lr"] == lr]) for lr in sorted({r["lr"] for r in rows})]
    for table in tables:
        print(f"lr {table['lr']:g}, {table['steps']} steps, bytes a step:")
        for name, bytes_per_step in table["bytes_per_step"].items():
            times = table["seed_over_this"][name]
            print(f"  {name:<28} {bytes_per_step:>12,}   1/{times:g} of the seed's")
    (results / "download.json").write_text(json.dumps(tables, indent=1) + "\n")


def _table(rows: list[Row]) -> Row:
    """Means over the recorded steps. Tenths: one step of ten is a checkpoint, nine are deltas."""
    elements = rows[0]["elements"]
    mean = {name: _mean_bytes(rows, name) for name in ("seed", "compact", "classes")}
    checkpoint = elements * BYTES_PER_WEIGHT
    seed = (checkpoint + (ANCHOR_EVERY - 1) * mean["seed"]) / ANCHOR_EVERY
    schemes = {"seed, anchors in the chain": seed} | {
        f"{name}, anchors beside": mean[name] for name in mean
    }
    return {
        "lr": rows[0]["lr"],
        "steps": len({row["step"] for row in rows}),
        "elements": elements,
        "anchor_every": ANCHOR_EVERY,
        "bytes_per_step": {name: round(size) for name, size in schemes.items()},
        "seed_over_this": {name: round(seed / size, 1) for name, size in schemes.items()},
    }


def _mean_bytes(rows: list[Row], encoding: str) -> float:
    sizes = [row["bytes"] for row in rows if row["encoding"] == encoding]
    return float(sum(sizes) / len(sizes))


if __name__ == "__main__":
    main(Path("bench/results"))
