"""Run by test_kill.py: for each line on stdin (a seed) forks a process that publishes without end.

Torch is imported once, here. The fork prints its pid just before it opens the run, and
`publishing` after.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from deltawire.store.local import LocalStore
from deltawire.sync.publisher import Publisher

SIDE = 64


def open_run(folder: Path, weight: torch.Tensor) -> Publisher:
    return Publisher.open(
        LocalStore(folder / "bucket"),
        run_id="run",
        named_tensors=[("weight", weight)],
        owner_file=folder / "owner",
        anchor_every=3,
        keep_versions=4,
    )


def publish_until_killed(folder: Path, seed: int) -> None:
    random_numbers = torch.Generator().manual_seed(seed)
    weight = torch.randn(SIDE, SIDE, generator=random_numbers)
    say(os.getpid())
    publisher = open_run(folder, weight)
    say("publishing")
    while True:
        weight += 1e-4 * torch.randn(SIDE, SIDE, generator=random_numbers)
        publisher.publish([("weight", weight)])


def load_kernels() -> None:
    """Compiled loops are loaded here once, so that a fork lives among writes, not imports."""
    with TemporaryDirectory() as folder:
        weight = torch.zeros(SIDE, SIDE)
        with open_run(Path(folder), weight) as publisher:
            publisher.publish([("weight", weight + 1)])


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    load_kernels()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            publish_until_killed(Path(sys.argv[1]), int(line))
        _, status = os.waitpid(child, 0)
        say(f"ended by {os.WTERMSIG(status)}")
