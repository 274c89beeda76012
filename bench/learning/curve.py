"""What a run earned, and whether ways differ by more than their seeds do."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from math import sqrt
from statistics import fmean, variance

_LAST_SHARE = 4
"""A run's end is its last quarter."""
_STANDARD_ERRORS = 2.5
"""Differences up to so many are noise: the 97.5 % quantile of Student's t with 6 degrees of
freedom (three ways, three seeds) is 2.45."""
_TRIFLE = 0.02
"""Differences up to this much reward mean nothing, however little the seeds differ: where all runs
reach the ceiling they hardly do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: mean reward of each step's rollouts."""

    way: str
    seed: int
    rewards: list[float]
    seconds: float
    """From the first to the last step, on a machine that others used as well."""
    staleness: list[float] = field(default_factory=list)
    """Mean age of each step's samples, in versions; empty where there is no such thing."""

    @property
    def start(self) -> float:
        """Mean reward before anything was learned: the first step's."""
        return self.rewards[0]

    @property
    def end(self) -> float:
        """Mean reward over the last quarter of the steps."""
        return fmean(self.rewards[-max(1, len(self.rewards) // _LAST_SHARE) :])

    @property
    def course(self) -> float:
        """Mean reward over all steps: how early it was learned."""
        return fmean(self.rewards)


Measure = Callable[[Curve], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measure of two ways, against the spread between seeds."""

    ways: tuple[str, str]
    difference: float
    band: float
    """Differences up to this are what seeds make."""

    @property
    def within_noise(self) -> bool:
        """Whether the two ways reach the same reward, as far as the seeds can tell."""
        return abs(self.difference) <= self.band


def end_of(curve: Curve) -> float:
    """Where a run arrives."""
    return curve.end


def course_of(curve: Curve) -> float:
    """How early a run learns."""
    return curve.course


def compare(curves: Sequence[Curve], measure: Measure = end_of) -> list[Comparison]:
    """Each pair of ways; nothing while a way has one seed only."""
    found = {way: [measure(c) for c in curves if c.way == way] for way in ways_of(curves)}
    if any(len(values) < 2 for values in found.values()):
        return []
    freedom = sum(len(values) - 1 for values in found.values())
    pooled = sum(variance(values) * (len(values) - 1) for values in found.values()) / freedom
    return [
        Comparison(
            ways=(a, b),
            difference=fmean(found[a]) - fmean(found[b]),
            band=max(
                _TRIFLE,
                _STANDARD_ERRORS * sqrt(pooled * (1 / len(found[a]) + 1 / len(found[b]))),
            ),
        )
        for a, b in combinations(found, 2)
    ]


def ways_of(curves: Sequence[Curve]) -> list[str]:
    """Names of the ways, in order of appearance."""
    return list(dict.fromkeys(curve.way for curve in curves))


def report(curves: Sequence[Curve]) -> dict[str, object]:
    """The result file."""
    return {
        "end": _measured(curves, end_of),
        "course": _measured(curves, course_of),
        "curves": [asdict(curve) for curve in curves],
    }


def _measured(curves: Sequence[Curve], measure: Measure) -> dict[str, object]:
    """A measure of every run, and the ways compared by it."""
    return {
        "values": {
            way: [round(measure(c), 4) for c in curves if c.way == way] for way in ways_of(curves)
        },
        "comparisons": [
            {**asdict(found), "within_noise": found.within_noise}
            for found in compare(curves, measure)
        ],
    }
