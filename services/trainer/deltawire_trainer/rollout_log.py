"""Rollouts for people: the newest in memory for the REST face, all as JSON lines on disk."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from deltawire.protocol.rollouts import Rollout, RolloutGroup
from deltawire.protocol.wire_model import WireModel

_REMEMBERED = 512
"""Rollouts held for GET /rollouts."""


class RolloutSummary(WireModel):
    """One line of GET /rollouts."""

    rollout_id: str
    group_id: str
    run_id: str
    """Rollout ids begin with it; it may be left out when one is asked for."""
    step: int
    reward: float | None
    """None of an error: there is none."""
    status: str
    reason: str
    """Why the status is not ok."""
    tokens: int
    oldest_version: int | None
    newest_version: int | None
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    info: dict[str, JsonValue]


class RolloutDetail(WireModel):
    """GET /rollouts/{id}."""

    summary: RolloutSummary
    rollout: Rollout


class RolloutLog:
    """What was trained on, newest last."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._recent: OrderedDict[str, RolloutDetail] = OrderedDict()

    def record(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Keep the groups of a step; written to `step_000001.jsonl` where there is a folder."""
        for group in groups:
            for rollout in group.rollouts:
                self._remember(step, group, rollout)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"step_{step:06d}.jsonl").open("w") as lines:
                lines.writelines(group.model_dump_json() + "\n" for group in groups)

    def newest(self, limit: int) -> list[RolloutSummary]:
        """The newest rollouts, newest first."""
        details = list(self._recent.values())[::-1]
        return [detail.summary for detail in details[:limit]]

    def find(self, rollout_id: str) -> RolloutDetail | None:
        """A remembered rollout, by its id with or without the run's in front."""
        return self._recent.get(rollout_id) or next(
            (
                detail
                for detail in self._recent.values()
                if detail.rollout.rollout_id == f"{detail.summary.run_id}-{rollout_id}"
            ),
            None,
        )

    def _remember(self, step: int, group: RolloutGroup, rollout: Rollout) -> None:
        summary = RolloutSummary(
            rollout_id=rollout.rollout_id,
            group_id=group.group_id,
            run_id=group.run_id,
            step=step,
            reward=None if rollout.status == "error" else rollout.reward,
            status=rollout.status,
            reason=rollout.reason,
            tokens=sum(sum(sequence.loss_mask) for sequence in rollout.sequences),
            oldest_version=rollout.oldest_version,
            newest_version=rollout.newest_version,
            reward_parts=rollout.reward_parts,
            metrics=rollout.metrics,
            info=rollout.info,
        )
        self._recent[rollout.rollout_id] = RolloutDetail(summary=summary, rollout=rollout)
        while len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
