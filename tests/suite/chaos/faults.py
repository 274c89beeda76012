"""Which faults come, in which order: drawn from a seed, so that a run can be repeated."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

from .wire import CUTS

FaultKind = Literal["kill", "stop", "cut"]
Target = Literal["trainer", "replica-0", "replica-1", "environment", "producer", "redis"]
LinkName = Literal[
    "trainer-redis", "replica-redis", "producer-redis", "replica-environment",
    "producer-environment", "producer-replica",
]  # fmt: skip

TARGETS: tuple[Target, ...] = get_args(Target)
LINKS: tuple[LinkName, ...] = get_args(LinkName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to whom, and how long to wait before the next."""

    kind: FaultKind
    target: str
    how: str
    """SIGKILL, SIGSTOP, or the way a link fails."""
    lasts_s: float
    then_s: float


def draw(
    rng: random.Random, *, kills: int, stops: int, cuts: int, lease_s: float, pace_s: float
) -> list[Fault]:
    """So many of each kind, shuffled. Every target and every way of cutting gets its turn; now and
    then the next fault comes at once."""

    def then_s() -> float:
        return 0.0 if rng.random() < 0.15 else rng.uniform(0.5, 1.5) * pace_s

    faults = [
        Fault(
            kind="kill", target=TARGETS[n % len(TARGETS)], how="SIGKILL", lasts_s=0, then_s=then_s()
        )
        for n in range(kills)
    ]
    faults += [
        Fault(
            kind="stop",
            target=TARGETS[n % len(TARGETS)],
            how="SIGSTOP",
            lasts_s=lease_s * rng.uniform(1.2, 2.0),
            then_s=then_s(),
        )
        for n in range(stops)
    ]
    first_link, first_cut = rng.randrange(len(LINKS)), rng.randrange(len(CUTS))
    faults += [
        Fault(
            kind="cut",
            target=LINKS[(first_link + n) % len(LINKS)],
            how=CUTS[(first_cut + n + n // len(CUTS)) % len(CUTS)],
            lasts_s=lease_s * rng.uniform(0.3, 1.5),
            then_s=then_s(),
        )
        for n in range(cuts)
    ]
    rng.shuffle(faults)
    return faults
