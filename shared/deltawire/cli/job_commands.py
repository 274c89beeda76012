"""`deltawire check` and `deltawire new`: what a user does before the first run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from deltawire.job.check import CheckReport

_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "fault": "[red]fault[/red]"}
_SHOWN = 160
"""Characters of a message that are shown."""


def check(
    job: Annotated[Path, typer.Argument(help="The job file, a Python file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides such as train.lr=2e-6.")
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Leave out settings that kept their default.")
    ] = False,
) -> None:
    """Check a job without a GPU and without network, and show what it resolves to."""
    from rich.console import Console
    from rich.markup import escape

    from deltawire.job.check import check_job

    report = check_job(job, overrides or [])
    console = Console()
    for finding in report.findings:
        mark = _MARKS[finding.verdict]
        console.print(f"{mark} {escape(finding.subject)}: {escape(finding.detail)}", soft_wrap=True)
    if report.episode:
        console.print("the recorded episode, in which fixed lines stand for the policy:")
    for message in report.episode:
        line = f"{message['role']:>9}: {_one_line(message['content'])}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = _settings_table(report, changed=changed)
    if table.row_count:
        console.print(table)
    raise typer.Exit(0 if report.passed else 1)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def _settings_table(report: "CheckReport", *, changed: bool) -> "Table":
    """What was set, and below a line what kept its default."""
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table("setting", Column("value", overflow="fold"), "from")
    chosen = [row for row in report.settings if row[2] != "default"]
    kept = [] if changed else report.settings[len(chosen) :]
    for rows in (chosen, kept):
        for name, value, origin in rows:
            table.add_row(name, escape(str(value)), origin)
        table.add_section()
    return table


def new(
    name: Annotated[str, typer.Argument(help="Name of the job, such as my_game.")],
    folder: Annotated[Path, typer.Option(help="Where to write it.")] = Path(),
) -> None:
    """Write a commented job file and its test."""
    from deltawire.job.starter import write_starter

    job, test = write_starter(name, folder)
    typer.echo(f"wrote {job} and {test}")
    typer.echo(f"next: deltawire check {job}; pytest {test}")


def mount(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(check)
    app.command()(new)
