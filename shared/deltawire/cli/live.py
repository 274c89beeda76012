"""The live terminal view of a run."""

from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deltawire.cli.observation import Observation
from deltawire.cli.plain import NOTHING_TO_LEARN, eval_line, mib, teaches_nothing

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_SAID = 4


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """The last values as bars between their own extremes."""
    recent = values[-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    span = (high - low) or 1.0
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] for v in recent)


class LiveView:
    """Redraws one panel; what the launcher says stays in its last lines."""

    def __init__(self, console: Console) -> None:
        self._said: deque[str] = deque(maxlen=_SAID)
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._seen: Observation | None = None

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, seen: Observation, *, last: bool = False) -> None:
        """Draw what was seen."""
        self._seen = seen
        self._live.update(self._draw(), refresh=last)

    def say(self, line: str) -> None:
        """A line of the launcher's own."""
        self._said.append(line)
        self._live.update(self._draw())

    def _draw(self) -> Panel:
        parts = [render(self._seen)] if self._seen is not None else []
        said = Text("\n".join(self._said), style="dim")
        return Panel(Group(*parts, said), title="deltawire", title_align="left")


def render(seen: Observation) -> Group:
    """The panel's inside."""
    trainer = seen.trainer
    if trainer is None:
        return Group(Text("starting"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=14)
    table.add_column()
    left_s = seen.seconds_left()
    left = "" if left_s is None else f"  about {left_s / 60:.1f} min left"
    table.add_row("step", f"{trainer.step} of {trainer.steps}  ({trainer.state}){left}")
    for name, value in _rows(seen):
        table.add_row(name, Text(value))
    bar = ProgressBar(total=trainer.steps, completed=trainer.step, width=_WIDTH)
    return Group(bar, table)


def _rows(seen: Observation) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    history = seen.history
    if history:
        last = history[-1]
        rows.append(
            ("reward", f"{last.reward:.3f}  {sparkline([step.reward for step in history])}")
        )
        rows += [
            (name, f"{last.metrics[name]:.3g}  {sparkline(_values(seen, name))}")
            for name in seen.show
            if name in last.metrics
        ]
        if seen.evals:
            rows.append(("evaluation", eval_line(seen.evals[-1])))
        rows.append(("staleness", f"{last.staleness:.2f} mean, {last.staleness_max} most"))
        rows.append(("tokens", f"{seen.tokens_per_s():.0f} /s trained"))
    rows.append(("version", _versions(seen)))
    synced = [step.sync for step in history if step.sync is not None]
    if synced:
        sync = synced[-1]
        ratio = sync.full_bytes / max(1, sync.bytes)
        rows.append(("changed", f"{100 * sync.density:.3f} % of the bf16 weights"))
        rows.append(
            ("delta", f"{mib(sync.bytes)} of {mib(sync.full_bytes)}  ({ratio:.0f}x smaller)")
        )
    pause = seen.pause_ms_mean()
    if pause is not None:
        rows.append(("pause", f"{pause:.1f} ms mean over {len(seen.updates)} swaps"))
    rows += _troubles(seen)
    rows.append(("waiting", seen.waiting()))
    return rows


def _troubles(seen: Observation) -> list[tuple[str, str]]:
    rows = []
    if seen.trainer is not None and seen.trainer.errors_total:
        errors = f"{seen.trainer.errors_total} rollouts left out: {seen.trainer.error_reason}"
        rows.append(("errors", errors))
    if any(teaches_nothing(step) for step in seen.history):
        rows.append(("warning", NOTHING_TO_LEARN))
    return rows


def _versions(seen: Observation) -> str:
    assert seen.trainer is not None
    served = ", ".join(
        f"{name} {status.state} {'-' if status.version is None else status.version}"
        for name, status in sorted(seen.replicas.items())
    )
    return f"trainer {seen.trainer.version}; {served or 'no replica yet'}"


def _values(seen: Observation, name: str) -> list[float]:
    return [step.metrics[name] for step in seen.history if name in step.metrics]
