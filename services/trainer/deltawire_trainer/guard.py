"""The guard: looks at each step's health and slows, tightens or stops the run, with a reason.

slow     issue tickets for one step less ahead, so that data arrives fresher
tighten  besides, reject samples one version earlier
stop     end the run: what follows would be noise

A single bad step does nothing; a threshold must be crossed PATIENCE times in a row. After the same
number of healthy steps the guard steps back by one. Pure: signals in, verdict out.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from deltawire.protocol.errors import DeltawireError


class GuardStopped(DeltawireError):
    """The run was ended in good order, but before its time: what followed would have been noise."""


Action = Literal["ok", "slow", "tighten", "stop"]

PATIENCE = 3
"""Steps in a row before the guard moves."""
ESS_LOW, ESS_VERY_LOW, ESS_HOPELESS = 0.5, 0.3, 0.1
"""Effective sample size, as a share: below these the batch speaks for few of its tokens."""
MISMATCH_HIGH, MISMATCH_HOPELESS = 0.1, 1.0
"""Nats per token between two engines at equal weights: above these they are not the same policy."""

_LADDER: tuple[Action, ...] = ("ok", "slow", "tighten", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """One step's health."""

    loss: float
    grad_norm: float
    ess: float
    mismatch_kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do, and why."""

    action: Action
    reason: str = ""


@dataclass(slots=True)
class Guard:
    """Holds how often in a row each rung was asked for."""

    enabled: bool = True
    level: int = 0
    _streak: int = 0
    _calm: int = 0
    _verdict: Verdict = field(default_factory=lambda: Verdict(action="ok"))

    def observe(self, signals: Signals) -> Verdict:
        """Judge a step. Returns the verdict that holds from now on."""
        if not self.enabled:
            return Verdict(action="ok")
        wanted = judge(signals)
        rung = _LADDER.index(wanted.action)
        if rung > self.level:
            self._calm, self._streak = 0, self._streak + 1
            if self._streak >= PATIENCE:
                self._move(rung, wanted.reason)
        elif rung < self.level:
            self._streak, self._calm = 0, self._calm + 1
            if self._calm >= PATIENCE:
                self._move(self.level - 1, "healthy again")
        else:
            self._streak = self._calm = 0
        return self._verdict

    def _move(self, level: int, reason: str) -> None:
        self.level, self._streak, self._calm = level, 0, 0
        self._verdict = Verdict(action=_LADDER[level], reason=reason if level else "")

    def allowed_staleness(self, max_staleness: int) -> int:
        """The staleness bound that holds now."""
        return max(0, max_staleness - 1) if self.level >= 2 else max_staleness

    def allowed_depth(self, max_staleness: int) -> int:
        """Steps ahead for which tickets may be issued now, beyond the current one."""
        return max(0, max_staleness - 1) if self.level >= 1 else max_staleness


def judge(signals: Signals) -> Verdict:
    """The rung that one step's signals ask for."""
    if not (math.isfinite(signals.loss) and math.isfinite(signals.grad_norm)):
        return Verdict(action="stop", reason="loss or gradient is not finite")
    if signals.ess < ESS_HOPELESS:
        return Verdict(action="stop", reason=f"effective sample size {signals.ess:.2f}")
    if signals.mismatch_kl > MISMATCH_HOPELESS:
        return Verdict(action="stop", reason=f"engine mismatch {signals.mismatch_kl:.2f} nats")
    if signals.ess < ESS_VERY_LOW:
        return Verdict(action="tighten", reason=f"effective sample size {signals.ess:.2f}")
    if signals.ess < ESS_LOW or signals.mismatch_kl > MISMATCH_HIGH:
        return Verdict(
            action="slow",
            reason=f"effective sample size {signals.ess:.2f}, "
            f"engine mismatch {signals.mismatch_kl:.3f} nats",
        )
    return Verdict(action="ok")
