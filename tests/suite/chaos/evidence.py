"""What is left after a run, read without the code that wrote it: journal, rollouts and bucket."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from deltawire.protocol.layout import ObjectKind
from deltawire.store.open import open_store
from deltawire.sync.audit import audit
from deltawire.sync.follower import Follower
from deltawire.sync.replay import empty_tensors, replay


@dataclass(slots=True)
class Account:
    """What the trainer's journal says, by a reading of our own."""

    issued: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    rolled_back: int = 0
    made_twice: list[int] = field(default_factory=list)
    """Steps that the journal has twice."""

    @property
    def trained(self) -> Counter[str]:
        """Group id -> in how many steps it was used."""
        return Counter(group_id for step in self.steps.values() for group_id in step["groups"])

    @property
    def doubled(self) -> list[str]:
        """Groups with more than one fate."""
        trained = self.trained
        return [g for g, times in trained.items() if times > 1 or g in self.dropped]

    @property
    def lost(self) -> set[str]:
        """Tickets without a fate."""
        return set(self.issued) - set(self.trained) - set(self.dropped)

    def missing(self, acknowledged: set[str]) -> set[str]:
        """Groups that Redis answered for and that have no fate."""
        return acknowledged - set(self.trained) - set(self.dropped)

    def rewards(self) -> list[float]:
        """Mean reward of each step, in order."""
        return [float(self.steps[step]["record"]["reward"]) for step in sorted(self.steps)]

    @classmethod
    def read(cls, journal: Path) -> "Account":
        """From a journal."""
        account = cls()
        for line in journal.read_text().splitlines():
            event = json.loads(line)
            match event["kind"]:
                case "issued":
                    account.issued += event["ids"]
                case "dropped":
                    account.dropped[event["group_id"]] = event["reason"]
                case "trained":
                    step = event["record"]["step"]
                    if step in account.steps:
                        account.made_twice.append(step)
                    account.steps[step] = event
                case "rolled_back":
                    account.rolled_back += 1
                    kept = event["step"]
                    account.steps = {n: s for n, s in account.steps.items() if n <= kept}
        return account


def recorded_groups(folder: Path) -> dict[int, set[str]]:
    """Step -> ids of the groups in its rollout file."""
    return {
        int(path.stem.removeprefix("step_")): {
            json.loads(line)["group_id"] for line in path.read_text().splitlines()
        }
        for path in folder.glob("step_*.jsonl")
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What a stranger finds in the bucket."""

    version: int
    gaps: list[int]
    """Versions that no delta leads to from the one before."""
    digest: str
    """Of weights made from nothing along the cheapest route."""
    faults: list[str]
    """Objects of the chain that do not hold what latest.json promises."""
    objects: int

    @classmethod
    def read(cls, store: str, run_id: str, cache: Path) -> "Bucket":
        """Replay everything there is."""
        follower = Follower(open_store(store), run_id, cache)
        head = follower.head()
        deltas = {
            link.version: link.base_version for link in head.links if link.kind is ObjectKind.DELTA
        }
        verdicts = list(audit(follower))
        route = follower.fetch(follower.route(None, int(head.version)))
        digest = replay(route, empty_tensors(follower.layout()), run_id=run_id)
        return cls(
            version=int(head.version),
            gaps=[v for v in range(1, head.version + 1) if deltas.get(v) != v - 1],
            digest=str(digest),
            faults=[f"{v.link.key}: {v.problem}" for v in verdicts if v.problem],
            objects=len(verdicts),
        )


def rise(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of the steps."""
    quarter = max(1, len(rewards) // 4)
    return fmean(rewards[:quarter]), fmean(rewards[-quarter:])
