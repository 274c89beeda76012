"""`deltawire check` and `deltawire new`: what a user does before the first run."""

from pathlib import Path
from typing import Annotated

import typer

_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "fault": "[red]fault[/red]"}


def check(
    job: Annotated[Path, typer.Argument(help="The job file, a Python file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides such as train.lr=2e-6.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show settings that kept their default too.")
    ] = False,
) -> None:
    """Check a job without a GPU and without network, and show what it resolves to."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from deltawire.job.check import check_job

    report = check_job(job, overrides or [])
    console = Console()
    for finding in report.findings:
        mark = _MARKS[finding.verdict]
        console.print(f"{mark} {escape(finding.subject)}: {escape(finding.detail)}", soft_wrap=True)
    table = Table("setting", "value", "from")
    for name, value, origin in report.settings:
        if everything or origin != "default":
            table.add_row(name, escape(str(value)), origin)
    if table.row_count:
        console.print(table)
    raise typer.Exit(0 if report.passed else 1)


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
