"""What the launcher saw at one moment, and over the run: the input of both views."""

from dataclasses import dataclass, field

from deltawire.cli.summary import mean, swaps
from deltawire.protocol.control import (
    AppliedUpdate,
    EnvironmentStatus,
    EvalRecord,
    ReplicaStatus,
    StepRecord,
    TrainerStatus,
)

_RECENT = 8
"""Steps that rates and the time left are measured over."""


@dataclass(slots=True)
class Observation:
    """The newest status of each service, and every update a replica reported."""

    show: list[str]
    trainer: TrainerStatus | None = None
    environment: EnvironmentStatus | None = None
    replicas: dict[str, ReplicaStatus] = field(default_factory=dict)
    updates: dict[tuple[str, int], AppliedUpdate] = field(default_factory=dict)

    def saw_replica(self, name: str, status: ReplicaStatus) -> None:
        """Keep the status, and the swaps it tells of."""
        self.replicas[name] = status
        for update in swaps(status.updates):
            self.updates[name, update.version] = update

    def pauses_ms(self) -> dict[int, list[float]]:
        """Version -> the pause of each replica that applied it."""
        pauses: dict[int, list[float]] = {}
        for (_, version), update in sorted(self.updates.items()):
            pauses.setdefault(version, []).append(update.pause_ms)
        return pauses

    @property
    def history(self) -> list[StepRecord]:
        """Steps so far."""
        return self.trainer.history if self.trainer else []

    @property
    def evals(self) -> list[EvalRecord]:
        """Evaluations so far, oldest version first."""
        return self.trainer.evals if self.trainer else []

    def tokens_per_s(self) -> float:
        """Tokens trained on per second, over the last steps."""
        recent = self.history[-_RECENT:]
        if len(recent) < 2:
            return 0.0
        seconds = recent[-1].finished_at - recent[0].finished_at
        return sum(step.tokens for step in recent[1:]) / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None before there is one."""
        recent = self.history[-_RECENT:]
        if self.trainer is None or len(recent) < 2:
            return None
        pace_s = (recent[-1].finished_at - recent[0].finished_at) / (len(recent) - 1)
        return max(0.0, pace_s * (self.trainer.steps - self.trainer.step))

    def pause_ms_mean(self) -> float | None:
        """Mean pause over all swaps of the run."""
        return mean([update.pause_ms for update in self.updates.values()])

    def waiting(self) -> str:
        """Who waits for whom: `step 1: 8 of 32 rollouts, waiting for inference-0 (...)`."""
        trainer = self.trainer
        if trainer is None:
            return "waiting for the trainer's first answer"
        step = f"step {trainer.step + 1}" if trainer.step < trainer.steps else "after the last step"
        if trainer.waits_for == "rollouts":
            held = f"{trainer.rollouts_held} of {trainer.rollouts_per_step} rollouts"
            said = f"{step}: {held}, waiting for {self._producers()}"
        elif trainer.waits_for:
            said = f"{step}: waiting for {trainer.waits_for}; {self._producers()}"
        else:
            said = f"{step}: {trainer.state}"
        return "; ".join([said, *_left_out(trainer)])

    def _producers(self) -> str:
        found = [_doing(name, status) for name, status in sorted(self.replicas.items())]
        return ", ".join(found) or "a replica"


def _doing(name: str, status: ReplicaStatus) -> str:
    if status.state != "serving":
        return f"{name} ({status.state})"
    waits = f", waits for {status.waits_for}" if status.waits_for else ""
    return f"{name} ({status.episodes_running} episodes running{waits})"


def _left_out(trainer: TrainerStatus) -> list[str]:
    """Why rollouts that were made do not count, where some do not."""
    said = []
    if trainer.errors_total:
        said.append(f"{trainer.errors_total} rollouts left out: {trainer.error_reason}")
    if trainer.groups.dropped:
        dropped = ", ".join(f"{n} {why}" for why, n in sorted(trainer.groups.dropped.items()))
        said.append(f"groups dropped: {dropped}")
    return said
