"""`deltawire check`: everything about a job that can be known without a GPU and without network."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deltawire.job.chat_template import (
    find_chat_template,
    is_folder_name,
    model_folders,
    role_problem,
    template_problem,
)
from deltawire.job.estimate import TYPICAL_DENSITY, estimate, readable_bytes
from deltawire.job.fault import describe
from deltawire.job.load import load_job
from deltawire.job.rehearsal import Rehearsal, rehearse
from deltawire.job.resolve import ResolvedJob, leaves, resolve
from deltawire.job.spec import JobSpec
from deltawire.job.transcript import Message
from deltawire.protocol.errors import JobError

Verdict = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    verdict: Verdict
    subject: str
    detail: str


@dataclass(slots=True)
class CheckReport:
    """All findings, and the resolved configuration with the origin of each value."""

    findings: list[Finding] = field(default_factory=list)
    settings: list[tuple[str, object, str]] = field(default_factory=list)
    """(dotted name, value, origin), the ones that are no defaults first."""
    episode: list[Message] = field(default_factory=list)
    """The recorded conversation, both sides."""

    @property
    def passed(self) -> bool:
        return all(finding.verdict != "fault" for finding in self.findings)

    def add(self, verdict: Verdict, subject: str, detail: str) -> None:
        """One more finding."""
        self.findings.append(Finding(verdict, subject, detail))


def check_job(path: Path, overrides: Sequence[str] = ()) -> CheckReport:
    """Load, resolve, play one recorded episode, score it, estimate. Raises nothing of the job's."""
    report = CheckReport()
    try:
        resolved = resolve(load_job(path), overrides)
    except JobError as error:
        report.add("fault", "job", str(error))
        return report
    spec = resolved.spec
    report.add("ok", "job", f"{spec.name}: {spec.env.name} with {spec.model.source}")
    report.settings = _settings(resolved)
    _judge_model(spec, report)
    _judge_tasks(resolved, report)
    rehearsal = _rehearse(resolved, report)
    if rehearsal is not None:
        _judge_rewards(resolved, rehearsal, report)
        _judge_agents(spec, rehearsal, report)
        _judge_template(spec, rehearsal, report)
    _judge_shape(spec, report)
    _judge_size(spec, report)
    return report


def _settings(resolved: ResolvedJob) -> list[tuple[str, object, str]]:
    rows = []
    for name, value in leaves(resolved.spec):
        parts = [
            origin
            for known, origin in resolved.origins.items()
            if known == name or known.startswith(f"{name}.")
        ]
        rows.append((name, value, next((p for p in reversed(parts) if p != "default"), "default")))
    return sorted(rows, key=lambda row: row[2] == "default")


def _judge_model(spec: JobSpec, report: CheckReport) -> None:
    source = spec.model.source
    if model_folders(source):
        return
    if is_folder_name(source):
        report.add("fault", "model", f"no folder {source}; model.source is a folder or a Hub id")
    else:
        report.add("note", "model", f"{source} is not here: the run will look for it on the Hub")


def _judge_tasks(resolved: ResolvedJob, report: CheckReport) -> None:
    """How many tasks there are to train on and to evaluate with, where the world can count."""
    world, evaluation = resolved.world, resolved.spec.eval
    splits = [*world.splits(), *([evaluation.split] if evaluation else [])]
    counts = {split: world.task_count(split) for split in splits}
    known = {split: count for split, count in counts.items() if count is not None}
    if not known:
        return
    told = ", ".join(f"{count:,} in {split}" for split, count in known.items())
    report.add("ok", "tasks", told)
    if evaluation is None:
        return
    held_out = known.get(evaluation.split, 0)
    if not held_out:
        report.add(
            "note",
            "eval",
            f"no task is in split {evaluation.split!r}, so evaluation would play what is trained "
            "on; give rows a column `split`, or more rows: one in ten is held out",
        )
    elif held_out < evaluation.episodes:
        report.add(
            "note",
            "eval",
            f"eval.episodes={evaluation.episodes}, but {held_out} tasks: some are played again",
        )


def _rehearse(resolved: ResolvedJob, report: CheckReport) -> Rehearsal | None:
    try:
        rehearsal = asyncio.run(_play_once(resolved))
    except Exception as error:  # noqa: BLE001 - the border to a user's world
        report.add("fault", "episode", f"{resolved.world.name} failed: {describe(error)}")
        return None
    transcript = rehearsal.transcript
    report.episode = transcript.messages
    end = "ended" if transcript.done else "was still going on at the turn limit"
    report.add("ok", "episode", f"a recorded one {end} after {transcript.turns} turns")
    if not transcript.messages[: transcript.prompt_length]:
        report.add("fault", "episode", "reset gave no message: the policy has nothing to read")
    return rehearsal


async def _play_once(resolved: ResolvedJob) -> Rehearsal:
    try:
        return await rehearse(resolved)
    finally:
        resolved.world.close()


def _judge_rewards(resolved: ResolvedJob, rehearsal: Rehearsal, report: CheckReport) -> None:
    score = rehearsal.score
    if score is None:
        report.add("ok", "reward", f"the world's own; {rehearsal.transcript.reward:g} here")
        return
    for name, reason in score.errors.items():
        report.add("fault", f"reward {name}", reason)
    for name, value in score.parts.items():
        report.add("ok", f"reward {name}", f"{value:g} on the recorded episode")
    silent = (
        {part.name for part in resolved.job.rewarders} - score.parts.keys() - score.errors.keys()
    )
    for name in sorted(silent):
        report.add("note", f"reward {name}", "does not apply to the recorded episode")


def _judge_agents(spec: JobSpec, rehearsal: Rehearsal, report: CheckReport) -> None:
    """Groups in which no chosen agent speaks are dropped: a run of such groups never steps."""
    if not spec.train.agents:
        return
    silent = [agent for agent in spec.train.agents if agent not in rehearsal.agents]
    spoke = ", ".join(rehearsal.agents)
    if len(silent) == len(spec.train.agents):
        report.add(
            "fault",
            "agents",
            f"train.agents names {', '.join(silent)}, but only {spoke} spoke in the recorded "
            "episode: every such group is dropped. Let the world bring a chosen agent into play "
            "whatever is said, or choose another",
        )
    elif silent:
        report.add("note", "agents", f"{', '.join(silent)} did not speak; {spoke} did")
    else:
        report.add("ok", "agents", f"{', '.join(spec.train.agents)} of {spoke}")


def _judge_template(spec: JobSpec, rehearsal: Rehearsal, report: CheckReport) -> None:
    messages = rehearsal.transcript.messages
    template = find_chat_template(spec.model.source)
    problem = role_problem(messages) if template is None else template_problem(template, messages)
    if template is None:
        report.add("note", "chat template", "none on this machine: only roles checked")
    if problem:
        report.add("fault" if template else "note", "chat template", problem)
    elif template is not None:
        report.add("ok", "chat template", "takes the recorded conversation turn by turn")


def _judge_shape(spec: JobSpec, report: CheckReport) -> None:
    spoken = spec.sampling.max_new_tokens * spec.env.max_turns
    if spoken >= spec.env.max_tokens:
        report.add(
            "note",
            "lengths",
            f"{spec.env.max_turns} turns of {spec.sampling.max_new_tokens} tokens do not fit "
            f"env.max_tokens={spec.env.max_tokens} with the prompt: long episodes are cut",
        )
    rollouts = spec.train.groups_per_step * spec.train.group_size
    if rollouts > spec.env.sessions:
        report.add(
            "note",
            "sessions",
            f"a step needs {rollouts} episodes, env.sessions={spec.env.sessions} run at a time",
        )


def _judge_size(spec: JobSpec, report: CheckReport) -> None:
    needs = estimate(spec)
    if needs is None:
        report.add("note", "size", "the model's name does not tell its size; no estimate")
        return
    report.add(
        "ok",
        "memory",
        f"trainer about {readable_bytes(needs.trainer_bytes)}, each replica "
        f"{readable_bytes(needs.replica_bytes)} and its key-value cache",
    )
    report.add(
        "ok",
        "bandwidth",
        f"a delta about {readable_bytes(needs.delta_bytes)} a step at {TYPICAL_DENSITY:.0%} "
        f"density, an anchor {readable_bytes(needs.anchor_bytes)}",
    )
    report.add(
        "ok",
        "work",
        f"{needs.rollouts_per_step} rollouts and at most {needs.tokens_per_step} tokens a step, "
        f"{spec.train.steps} steps",
    )
