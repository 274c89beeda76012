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
    step: int
    reward: float
    status: str
    tokens: int
    oldest_version: int | None
    newest_version: int | None
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
                self._remember(step, group.group_id, rollout)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"step_{step:06d}.jsonl").open("w") as lines:
                lines.writelines(group.model_dump_json() + "\n" for group in groups)

    def newest(self, limit: int) -> list[RolloutSummary]:
        """The newest rollouts, newest first."""
        details = list(self._recent.values())[::-1]
        return [detail.summary for detail in details[:limit]]

    def find(self, rollout_id: str) -> RolloutDetail | None:
        """A remembered rollout."""
        return self._recent.get(rollout_id)

    def _remember(self, step: int, group_id: str, rollout: Rollout) -> None:
        summary = RolloutSummary(
            rollout_id=rollout.rollout_id,
            group_id=group_id,
            step=step,
            reward=rollout.reward,
            status=rollout.status,
            tokens=sum(sum(sequence.loss_mask) for sequence in rollout.sequences),
            oldest_version=rollout.oldest_version,
            newest_version=rollout.newest_version,
            metrics=rollout.metrics,
            info=rollout.info,
        )
        self._recent[rollout.rollout_id] = RolloutDetail(summary=summary, rollout=rollout)
        while len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
