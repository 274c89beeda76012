"""docs/reliability.md: what was done to a run and what was seen after, as tables."""

import os
import platform
from collections import Counter
from collections.abc import Iterable
from statistics import median

from .evidence import rise
from .faults import Fault
from .storm import Outcome, Seen

_WHO = {
    "trainer": "trainer",
    "replica-0": "replica",
    "replica-1": "replica",
    "environment": "environment",
    "producer": "producer (`deltawire worker`)",
    "redis": "Redis",
}
_CUTS = {
    "drop": "connections reset, new ones refused",
    "delay": "every piece late",
    "stall": "nothing passes, all of it arrives later",
    "half_close": "questions pass, answers are lost",
}


def page(outcome: Outcome, *, seed: int) -> str:
    """The whole page."""
    return (
        "\n\n".join(
            [
                "# Reliability: what was broken, and what was seen after",
                _preamble(outcome, seed),
                "## Faults",
                _faults(outcome.seen),
                "## Groups",
                _groups(outcome),
                "## Versions and bits",
                _bits(outcome),
                "## How it is known",
                _METHOD,
            ]
        )
        + "\n"
    )


def _preamble(outcome: Outcome, seed: int) -> str:
    kills = sum(seen.fault.kind == "kill" for seen in outcome.seen)
    first, last = rise(outcome.account.rewards())
    return (
        "This page is written by `make chaos` (`tests/suite/chaos`), which fails unless every "
        "promise below held.\n\n"
        f"One run of {outcome.wall_s / 60:.0f} minutes with two replicas, one of which makes "
        "rollouts, a producer of its own, an environment, a trainer and Redis "
        "(`appendfsync always`), all real processes on "
        f"{os.cpu_count()} shared cores, Python {platform.python_version()}, seed {seed}: "
        f"**{kills} kills**, {len(outcome.seen) - kills} other faults, "
        f"{len(outcome.account.steps)} optimizer steps. Whoever died was started again at once. "
        f"Mean reward rose from {first:.3f} (first quarter of the steps) to {last:.3f} (last); the "
        f"longest time between two steps was {outcome.longest_stall_s:.0f} s."
    )


def _faults(seen: list[Seen]) -> str:
    rows = [
        "| fault | of | times | seconds until it works again: median | longest |",
        "|---|---|--:|--:|--:|",
    ]
    for name, group in _grouped(seen):
        took = [one.recovery_s for one in group]
        rows.append(f"| {name} | {len(took)} | {median(took):.1f} | {max(took):.1f} |")
    rows.append("")
    rows.append(
        "A killed trainer works again when it has made a step, a replica and an environment when "
        "they are ready, a producer when Redis has answered it, Redis when it answers. Services "
        "are forked from a process that has imported torch: the seconds for that are not in here. "
        "After a stall the clock starts with SIGCONT, after a cut with the healed link, and stops "
        "with the trainer's next step. Much of the time is waiting for the cores."
    )
    return "\n".join(rows)


def _grouped(seen: Iterable[Seen]) -> list[tuple[str, list[Seen]]]:
    groups: dict[tuple[str, str], list[Seen]] = {}
    for one in seen:
        groups.setdefault(_kind(one.fault), []).append(one)
    return [(f"{how} | {who}", found) for (how, who), found in sorted(groups.items())]


def _kind(fault: Fault) -> tuple[str, str]:
    match fault.kind:
        case "kill":
            return "SIGKILL", _WHO[fault.target]
        case "stop":
            return "SIGSTOP longer than a lease, SIGCONT", _WHO[fault.target]
        case _:
            return f"cut: {_CUTS[fault.how]}", fault.target.replace("-", " to ")


def _groups(outcome: Outcome) -> str:
    account = outcome.account
    reasons = Counter(account.dropped.values())
    rows = [
        "| groups | |",
        "|---|--:|",
        f"| tickets issued | {len(account.issued)} |",
        f"| appends that Redis acknowledged, as heard on the wires | {len(outcome.acknowledged)} |",
        f"| trained on | {len(account.trained)} |",
        *(f"| dropped: {reason} | {count} |" for reason, count in sorted(reasons.items())),
        f"| acknowledged and neither trained on nor dropped | "
        f"{len(account.missing(outcome.acknowledged))} |",
        f"| trained on twice | {len(account.doubled)} |",
        f"| tickets without a fate | {len(account.lost)} |",
        f"| left in Redis | {sum(outcome.left_in_redis.values())} |",
    ]
    return "\n".join(rows)


def _bits(outcome: Outcome) -> str:
    bucket = outcome.bucket
    same = {bucket.digest, outcome.trainer.digest} | {
        replica.digest for replica in outcome.replicas.values()
    }
    return "\n".join(
        [
            "| | |",
            "|---|--:|",
            f"| steps in the journal, without a gap | {len(outcome.account.steps)} |",
            f"| newest version | {bucket.version} |",
            f"| versions that no delta leads to | {len(bucket.gaps)} |",
            f"| objects of the chain, each replayed and compared | {bucket.objects} |",
            f"| of them faulty | {len(bucket.faults)} |",
            f"| different digests among trainer, two replicas and a fresh replay | {len(same)} |",
            f"| processes that ended by themselves | {len(outcome.own_ends)} |",
        ]
    )


_METHOD = """\
* **Acknowledged** is what a TCP proxy in front of Redis heard: it reads the protocol, pairs each
  append with its reply, and writes the group's id down when the reply says that it is on the
  stream, whether or not the reply then reaches the producer.
* **Trained on** and **dropped** are read from the trainer's journal by other code than the
  trainer's, and compared with the rollouts it wrote to disk.
* **Bits**: after the end a stranger with an empty cache replays the bucket from nothing, along the
  cheapest route and object by object.
* Faults are drawn from a seed: `make chaos SEED=2 KILLS=300`. A small run of the same test is part
  of `make e2e`."""
