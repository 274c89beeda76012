"""The closing table of a run, and what it exits with."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.cli.plain import NOTHING_TO_LEARN, eval_line, mib
from deltawire.cli.summary import RunSummary, mean

_FIRST, _LAST = 3, 5
"""Steps averaged at the start and at the end of a run that has as many; else its halves."""


def print_report(summary: RunSummary, console: Console) -> int:
    """Print it. 0 when the run finished, in every bit, with nothing lost; else 1 and why."""
    table = Table(title=f"run {summary.run_id}: {summary.job}", show_header=False)
    for name, value in _rows(summary):
        table.add_row(name, Text(value))
    console.print(table)
    for name, path in summary.paths.items():
        console.print(f"{name + ':':14}{path}", soft_wrap=True, highlight=False)
    faults = _faults(summary)
    for fault in faults:
        console.print(f"fault: {fault}", style="red", soft_wrap=True)
    return 1 if faults else 0


def _rows(summary: RunSummary) -> list[tuple[str, str]]:
    rewards = [step.reward for step in summary.steps]
    densities = [step.density for step in summary.steps if step.density is not None]
    deltas = [step.delta_bytes for step in summary.steps if step.delta_bytes is not None]
    full = [step.full_bytes for step in summary.steps if step.full_bytes is not None]
    pauses = [step.pause_ms for step in summary.steps if step.pause_ms is not None]
    groups = summary.groups
    dropped = ", ".join(f"{n} {why}" for why, n in sorted(groups.dropped.items())) or "0"
    return [
        ("steps", f"{len(summary.steps)} in {summary.seconds / 60:.1f} min"),
        ("reward", _ends(rewards)),
        *_evaluations(summary),
        ("version", f"{summary.version}, digest {summary.digest[:16]}…"),
        ("replicas", _replicas(summary)),
        ("changed", f"{_percent(mean(densities))} of the bf16 weights per step"),
        ("delta", f"{_bytes(deltas)} per step instead of {_bytes(full)}"),
        ("pause", f"{_number(mean(pauses))} ms per swap"),
        ("groups", f"{groups.issued} issued, {groups.trained} trained, dropped: {dropped}"),
        ("", f"{groups.lost} lost, {groups.doubled} doubled"),
        *_troubles(summary),
        *([("restarts", str(summary.restarts))] if summary.restarts else []),
    ]


def _ends(rewards: list[float]) -> str:
    """The mean reward where the run began and where it ended, over steps that do not overlap."""
    if len(rewards) < 2:
        return _number(mean(rewards))
    half = len(rewards) // 2
    first, last = (half, half) if len(rewards) < _FIRST + _LAST else (_FIRST, _LAST)
    began, ended = _number(mean(rewards[:first])), _number(mean(rewards[-last:]))
    if first == 1:
        return f"{began} in the first step, {ended} in the last"
    return f"{began} in the first {first} steps, {ended} in the last {last}"


def _evaluations(summary: RunSummary) -> list[tuple[str, str]]:
    """The first and the last, and any that was not finished."""
    shown = {
        record.version: record
        for at, record in enumerate(summary.evals)
        if at in (0, len(summary.evals) - 1) or record.finished < record.expected
    }
    return [("evaluation", eval_line(record)) for record in shown.values()]


def _troubles(summary: RunSummary) -> list[tuple[str, str]]:
    reason = f": {summary.error_reason}" if summary.errors else ""
    rows = [("errors", f"{summary.errors} rollouts left out{reason}")]
    silent = sum(step.groups_with_signal == 0 for step in summary.steps)
    if silent:
        rows.append(("warning", f"in {silent} of {len(summary.steps)} steps {NOTHING_TO_LEARN}"))
    return rows


def _replicas(summary: RunSummary) -> str:
    return ", ".join(
        f"{r.replica_id} at {r.version} "
        + ("equal in every bit" if r.digest == summary.digest else "DIFFERENT")
        for r in summary.replicas
    )


def _faults(summary: RunSummary) -> list[str]:
    faults = []
    if summary.state != "finished":
        faults.append(f"the trainer ended as {summary.state}")
    if not summary.equal:
        faults.append("a replica is not on the trainer's version, or not equal to it")
    if summary.groups.lost:
        faults.append(f"{summary.groups.lost} groups were lost")
    return faults


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _bytes(values: list[int]) -> str:
    return mib(sum(values) / len(values)) if values else "-"
