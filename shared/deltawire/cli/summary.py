"""What a run was: summary.json, the closing table, and the reward curve."""

import json
import math
from pathlib import Path

from pydantic import Field

from deltawire.protocol.control import (
    AppliedUpdate,
    EvalRecord,
    GroupCounts,
    ReplicaStatus,
    StepRecord,
    TrainerStatus,
)
from deltawire.protocol.wire_model import WireModel


class StepSummary(WireModel):
    """One step, with what the replicas said of the version it published."""

    step: int
    version: int
    reward: float
    density: float | None
    delta_bytes: int | None
    full_bytes: int | None
    pause_ms: float | None
    """Mean over the replicas that applied this version; None when they skipped past it."""
    staleness: float
    tokens: int
    key: str | None
    encoding: str | None
    phases_s: dict[str, float]
    metrics: dict[str, float]
    errors: int = 0
    """Rollouts left out because of an error."""
    error_reason: str = ""
    """The most frequent one."""
    groups_with_signal: int | None = None
    """Groups whose rewards differed; 0: there was nothing to learn."""


class ReplicaSummary(WireModel):
    """Where a replica ended."""

    replica_id: str
    version: int | None
    digest: str
    updates: int
    rejected: int
    pause_ms_mean: float | None


class RunSummary(WireModel):
    """runs/<id>/summary.json."""

    run_id: str
    job: str
    model: str
    state: str
    steps: list[StepSummary]
    version: int
    digest: str
    replicas: list[ReplicaSummary]
    groups: GroupCounts
    evals: list[EvalRecord] = Field(default_factory=list)
    """Oldest version first."""
    errors: int = 0
    """Rollouts left out because of an error, over the whole run."""
    error_reason: str = ""
    seconds: float
    show: list[str] = Field(default_factory=list)
    """Metrics that the job shows beside the reward."""
    restarts: dict[str, int] = Field(default_factory=dict)
    paths: dict[str, str] = Field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Every replica ended on the trainer's version, in every bit."""
        return bool(self.replicas) and all(
            r.version == self.version and r.digest == self.digest for r in self.replicas
        )


def summarise(
    trainer: TrainerStatus,
    replicas: list[ReplicaStatus],
    *,
    pauses: dict[int, list[float]],
    show: list[str],
    seconds: float,
    restarts: dict[str, int],
    paths: dict[str, str],
) -> RunSummary:
    """Join what the services said. `pauses` maps a version to each replica's pause in ms."""
    return RunSummary(
        run_id=trainer.run_id,
        job=trainer.job,
        model=trainer.model,
        state=trainer.state,
        steps=[_step(record, pauses.get(record.version, [])) for record in trainer.history],
        version=trainer.version,
        digest=trainer.digest,
        replicas=[_replica(status) for status in replicas],
        groups=trainer.groups,
        evals=trainer.evals,
        errors=trainer.errors_total,
        error_reason=trainer.error_reason,
        seconds=seconds,
        show=show,
        restarts=restarts,
        paths=paths,
    )


def _step(record: StepRecord, pauses_ms: list[float]) -> StepSummary:
    sync = record.sync
    return StepSummary(
        step=record.step,
        version=record.version,
        reward=record.reward,
        density=sync.density if sync else None,
        delta_bytes=sync.bytes if sync else None,
        full_bytes=sync.full_bytes if sync else None,
        pause_ms=mean(pauses_ms),
        staleness=record.staleness,
        tokens=record.tokens,
        key=sync.key if sync else None,
        encoding=sync.encoding if sync else None,
        phases_s=record.phases_s,
        metrics=record.metrics,
        errors=record.errors,
        error_reason=record.error_reason,
        groups_with_signal=record.groups_with_signal,
    )


def _replica(status: ReplicaStatus) -> ReplicaSummary:
    return ReplicaSummary(
        replica_id=status.replica_id,
        version=status.version,
        digest=status.digest,
        updates=status.updates_total,
        rejected=status.rejected_total,
        pause_ms_mean=mean([update.pause_ms for update in swaps(status.updates)]),
    )


def swaps(updates: list[AppliedUpdate]) -> list[AppliedUpdate]:
    """Updates that replaced live weights: the first load pauses nobody."""
    return [update for update in updates if update.base_version is not None]


def mean(values: list[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def write_summary(summary: RunSummary, folder: Path) -> Path:
    """summary.json, whole or not at all."""
    path = folder / "summary.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(summary.model_dump(mode="json"), indent=1) + "\n")
    partial.replace(path)
    return path


def draw_reward(summary: RunSummary, path: Path) -> None:
    """The reward curve, with the density of each delta below it, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    steps = [step.step for step in summary.steps]
    top.plot(steps, [step.reward for step in summary.steps], label="reward", linewidth=2)
    for name in summary.show:
        values = [step.metrics.get(name, math.nan) for step in summary.steps]
        if max((v for v in values if not math.isnan(v)), default=0.0) <= 1.0:
            top.plot(steps, values, label=name, linewidth=1, alpha=0.7)
    top.set_title(f"{summary.job} · {summary.model}")
    top.legend(loc="upper left", fontsize=8)
    top.grid(alpha=0.3)
    bottom.bar(steps, [100 * (step.density or 0.0) for step in summary.steps], color="tab:gray")
    bottom.set_ylabel("changed, %")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=110)
