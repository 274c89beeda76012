"""What old data does: samples 16 versions behind, with and without correction, and under the guard.

The tiny model of bench/learning on its task, whole loop in one process. A step gets its groups only
while those of 16 more steps wait behind them, so that every sample is as old as it may be. Writes
bench/results/staleness.json and .png after every run.

    python -m bench staleness
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from bench.learning.in_process import run
from bench.learning.picture import smooth
from bench.learning.tiny_model import write_tiny_model
from deltawire.job.load import load_job
from deltawire.job.resolve import resolve
from deltawire.streams.base import DeliveredGroup, TrainerStreams

JOB = Path(__file__).parent / "learning" / "jobs" / "lower_case.py"
RESULTS = Path(__file__).parent / "results"
VERSIONS = 16
OLD = f"train.max_staleness={VERSIONS}"
STILL_S = 5.0
"""A queue that nothing came to for so long is as full as it gets."""
COMMON = ("train.steps=40", "train.lr=2e-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to treat old samples."""

    name: str
    title: str
    overrides: tuple[str, ...]


ARMS = (
    Arm(
        name="fresh",
        title="fresh samples",
        overrides=("train.max_staleness=0", "train.guard=false"),
    ),
    Arm(
        name="corrected",
        title="16 versions old, token_truncate",
        overrides=(OLD, "train.correction=token_truncate", "train.guard=false"),
    ),
    Arm(
        name="uncorrected",
        title="16 versions old, no correction",
        overrides=(OLD, "train.correction=none", "train.guard=false"),
    ),
    Arm(
        name="guarded",
        title="16 versions old, no correction, guard on",
        overrides=(OLD, "train.correction=none", "train.guard=true"),
    ),
)


class FullQueue:
    """Streams that hand out a step's groups only while a whole queue of them waits, or as many as
    the guard still lets be made: the queue no longer grows."""

    def __init__(self, streams: TrainerStreams, *, queue: int, at_once: int, total: int) -> None:
        self._streams, self._queue, self._at_once, self._left = streams, queue, at_once, total
        self._waiting, self._grew = 0, time.monotonic()

    def __getattr__(self, name: str) -> object:
        return getattr(self._streams, name)

    async def read(self, *, limit: int, timeout_s: float) -> list[DeliveredGroup]:
        """As TrainerStreams.read, later. The last groups of a run have no queue behind them."""
        waiting = (await self._streams.depth()).groups_unread
        if waiting != self._waiting:
            self._waiting, self._grew = waiting, time.monotonic()
        growing = waiting == 0 or time.monotonic() - self._grew < STILL_S
        if waiting < min(self._queue, self._left) and growing:
            await asyncio.sleep(min(timeout_s, 0.1))
            return []
        found = await self._streams.read(limit=min(limit, self._at_once), timeout_s=timeout_s)
        self._left -= len(found)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One run of an arm."""

    arm: str
    seed: int
    rewards: list[float]
    staleness: list[float]
    ess: list[float]
    """Effective sample size of each step, as a share."""
    end: str
    """finished, or why it was stopped."""


def main() -> None:
    """Run every arm over every seed, then draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--arms", nargs="+", default=[arm.name for arm in ARMS])
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every arm")
    options = parser.parse_args()
    courses = []
    with tempfile.TemporaryDirectory(prefix="staleness-") as scratch:
        model = write_tiny_model(Path(scratch) / "model")
        for seed in options.seeds:
            for arm in ARMS:
                if arm.name not in options.arms:
                    continue
                told = [*COMMON, *options.set, f"model.source={model}", f"train.seed={seed}"]
                folder = Path(scratch) / f"{arm.name}-{seed}"
                courses.append(_course(arm, seed, told, folder))
                print(arm.name, seed, courses[-1].rewards[-1], courses[-1].end, flush=True)
                write(courses, options.out)


def _course(arm: Arm, seed: int, overrides: list[str], folder: Path) -> Course:
    folder.mkdir()
    resolved = resolve(load_job(JOB), [*overrides, *arm.overrides])
    train = resolved.spec.train
    status = asyncio.run(
        run(
            resolved,
            folder,
            seen_through=lambda streams: FullQueue(
                streams,
                queue=(train.max_staleness + 1) * train.groups_per_step,
                at_once=train.groups_per_step,
                total=train.steps * train.groups_per_step,
            ),
        )
    )
    return Course(
        arm=arm.name,
        seed=seed,
        rewards=[record.reward for record in status.history],
        staleness=[record.staleness for record in status.history],
        ess=[record.ess for record in status.history],
        end=status.reason or status.state,
    )


def write(courses: Sequence[Course], out: Path) -> None:
    """The result files, so far."""
    rows = [asdict(course) for course in courses]
    (out / "staleness.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(courses, out / "staleness.png")


def draw(courses: Sequence[Course], path: Path) -> None:
    """Reward and effective sample size of each run; a cross where the guard stopped one."""
    figure, axes = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    for color, arm in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], ARMS, strict=False):
        mine = [course for course in courses if course.arm == arm.name]
        for number, course in enumerate(mine):
            steps = np.arange(1, len(course.rewards) + 1)
            label = arm.title if number == 0 else None
            axes[0].plot(steps, smooth(course.rewards), color=color, label=label, alpha=0.8)
            axes[1].plot(steps, smooth(course.ess), color=color, alpha=0.8)
            if course.end != "finished":
                axes[0].plot(steps[-1], smooth(course.rewards)[-1], "x", color=color, ms=12, mew=3)
    axes[0].set(title="two layers from random weights: lower-case letters", ylabel="mean reward")
    axes[1].set(xlabel="step", ylabel="effective sample size", ylim=(0, 1.05))
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
