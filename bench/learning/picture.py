"""The curves: mean over seeds for each way, and the band between its lowest and highest seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from bench.learning.curve import Curve, ways_of

_WINDOW = 3
"""Steps averaged, for the eye; the figures come from the raw curves."""


def draw(curves: Sequence[Curve], titles: Mapping[str, str], title: str, path: Path) -> None:
    """Write the picture."""
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for way in ways_of(curves):
        rewards = np.array([smooth(curve.rewards) for curve in curves if curve.way == way])
        steps = np.arange(1, rewards.shape[1] + 1)
        (line,) = axis.plot(steps, rewards.mean(0), label=f"{titles[way]} ({len(rewards)} seeds)")
        axis.fill_between(steps, rewards.min(0), rewards.max(0), alpha=0.15, color=line.get_color())
    axis.set(title=title, xlabel="step", ylabel="mean reward of the step's rollouts")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over the last few steps."""
    return [float(np.mean(values[max(0, i - _WINDOW + 1) : i + 1])) for i in range(len(values))]
