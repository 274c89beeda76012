"""One optimizer step: packed forward and backward over all micro-batches, then the update.

The two halves are separate because masters and optimizer state change only in `apply`: a
checkpoint may be written beside `accumulate`, without a copy of the weights.
"""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from deltawire.job.spec import TrainSpec
from deltawire_trainer.batches import Budget, PackedBatch, pack
from deltawire_trainer.correction import correct
from deltawire_trainer.losses.algorithms import ALGORITHMS
from deltawire_trainer.losses.reduction import Totals
from deltawire_trainer.losses.terms import LossInput, k3
from deltawire_trainer.optimizer import learning_rate, set_learning_rate
from deltawire_trainer.policy import Policy, Reference
from deltawire_trainer.samples import TrainingSample
from deltawire_trainer.staleness import effective_sample_size, mismatch_kl

_CPU_TOKENS = 1024
"""Longest packed row on a CPU: beyond it the quadratic part of attention outgrows what sharing
prefixes saves, and a smaller micro-batch costs nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What `accumulate` found; the gradient itself lies in the parameters."""

    loss: float
    ess: float
    mismatch_kl: float
    metrics: dict[str, float]
    signal: bool
    """False when no sample had an advantage: there is nothing to apply."""
    forward_backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What `apply` did."""

    lr: float
    grad_norm: float
    applied: bool
    """False without a signal, or when the gradient was not finite."""
    optimizer_s: float


class Interrupted(Exception):
    """The process is asked to end: the step is left unfinished."""


@dataclass(slots=True)
class _Tally:
    """Detached token values of all micro-batches, for the step's statistics."""

    log_ratio: list[torch.Tensor]
    versions: list[torch.Tensor]
    weights: list[torch.Tensor]
    entropy: list[torch.Tensor]
    clipped_low: list[torch.Tensor]
    clipped_high: list[torch.Tensor]
    reference_kl: list[torch.Tensor]


class Learner:
    """Turns training samples into one update of the policy."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        spec: TrainSpec,
        *,
        max_tokens: int,
        reference: Reference | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self._spec = spec
        self._algorithm = ALGORITHMS[spec.algorithm]
        self._max_tokens = max_tokens
        self._reference = reference
        longest = spec.tokens_per_microbatch
        if policy.device.type == "cpu":
            longest = min(longest, _CPU_TOKENS)
        self.interrupt = threading.Event()
        """Set to leave `accumulate` between two micro-batches."""
        self._budget = Budget(tokens=longest, share_prefixes=policy.shares_prefixes)

    def accumulate(self, samples: Sequence[TrainingSample], *, live_version: int) -> Gradient:
        """Leave the gradient of the step's loss in the masters. Raises Interrupted."""
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        totals = Totals(
            samples=len(samples),
            tokens=sum(len(sample.trained) for sample in samples),
            max_tokens=self._max_tokens,
        )
        tally = _Tally([], [], [], [], [], [], [])
        loss = 0.0
        taught = self._with_signal(samples)
        for batch in pack(taught, self._budget):
            if self.interrupt.is_set():
                raise Interrupted
            loss += self._backward(batch.to(self.policy.device), totals, tally)
        return Gradient(
            loss=loss,
            signal=bool(taught),
            forward_backward_s=time.perf_counter() - started,
            **_statistics(tally, live_version),
        )

    def apply(self, gradient: Gradient, *, step: int) -> Update:
        """Clip, then one AdamW update. A gradient that is not finite is left out."""
        started = time.perf_counter()
        lr = learning_rate(self._spec, step)
        set_learning_rate(self.optimizer, lr)
        grad_norm, applied = 0.0, False
        if gradient.signal:
            masters = list(self.policy.masters.values())
            grad_norm = float(torch.nn.utils.clip_grad_norm_(masters, self._spec.max_grad_norm))
            applied = math.isfinite(grad_norm)
            if applied:
                self.optimizer.step()
                self.policy.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        took = time.perf_counter() - started
        return Update(lr=lr, grad_norm=grad_norm, applied=applied, optimizer_s=took)

    def _with_signal(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Samples that can move the policy: without an advantage only a regulariser can."""
        if self._spec.kl_coef or self._spec.entropy_coef:
            return list(samples)
        return [sample for sample in samples if sample.has_signal]

    def _backward(self, batch: PackedBatch, totals: Totals, tally: _Tally) -> float:
        """Add one micro-batch's gradient; returns its share of the loss."""
        spec = self._spec
        logprobs = self.policy.logprobs(batch, entropy_gradient=spec.entropy_coef > 0)
        policy_logprobs = logprobs.tokens
        correction = correct(
            spec.correction,
            policy_logprobs=policy_logprobs,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            sample_index=batch.sample_index,
            samples=len(batch.samples),
            cap=spec.correction_cap,
        )
        token_loss = self._algorithm.loss(
            LossInput(
                policy_logprobs=policy_logprobs,
                old_logprobs=correction.old_logprobs,
                advantages=batch.advantages,
                sample_index=batch.sample_index,
                samples=len(batch.samples),
                clip_low=spec.clip_low,
                clip_high=spec.clip_high,
            )
        )
        values = token_loss.values * correction.weights
        if self._reference is not None and spec.kl_coef:
            kl = self._reference_kl(batch, policy_logprobs)
            values = values + spec.kl_coef * kl
            tally.reference_kl.append(kl.detach())
        if spec.entropy_coef:
            values = values - spec.entropy_coef * logprobs.entropy
        loss = self._algorithm.reduce(values, batch.sample_index, len(batch.samples), totals)
        loss.backward()
        self.policy.collect_gradients()
        tally.log_ratio.append(policy_logprobs.detach() - batch.behaviour_logprobs)
        tally.versions.append(batch.versions)
        tally.weights.append(correction.weights)
        tally.entropy.append(logprobs.entropy.detach())
        tally.clipped_low.append(token_loss.clipped_low)
        tally.clipped_high.append(token_loss.clipped_high)
        return float(loss.detach())

    def _reference_kl(self, batch: PackedBatch, policy_logprobs: torch.Tensor) -> torch.Tensor:
        """[T] estimate of KL(policy || reference), with gradient."""
        assert self._reference is not None
        with torch.no_grad():
            reference = self._reference.logprobs(batch).tokens
        return k3(reference - policy_logprobs)


class _Statistics(TypedDict):
    ess: float
    mismatch_kl: float
    metrics: dict[str, float]


def _statistics(tally: _Tally, live_version: int) -> _Statistics:
    """The step's health from its tokens; neutral values when nothing was forwarded."""
    if not tally.log_ratio:
        return {"ess": 1.0, "mismatch_kl": 0.0, "metrics": {}}
    log_ratio = torch.cat(tally.log_ratio)
    weights = torch.cat(tally.weights)
    metrics = {
        "entropy": float(torch.cat(tally.entropy).mean()),
        "ratio": float(log_ratio.exp().mean()),
        "clipped_low": float(torch.cat(tally.clipped_low).float().mean()),
        "clipped_high": float(torch.cat(tally.clipped_high).float().mean()),
        "left_out": float((weights == 0).float().mean()),
        "weight": float(weights.mean()),
    }
    if tally.reference_kl:
        metrics["reference_kl"] = float(torch.cat(tally.reference_kl).mean())
    return {
        "ess": effective_sample_size(log_ratio),
        "mismatch_kl": mismatch_kl(log_ratio, torch.cat(tally.versions) == live_version),
        "metrics": metrics,
    }
