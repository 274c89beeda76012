"""`deltawire`: the command line. Each command imports its room when it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from deltawire.cli import deltas, job_commands
from deltawire.cli.rollout_commands import rollouts, worker
from deltawire.protocol.errors import DeltawireError

app = typer.Typer(
    name="deltawire",
    help="Asynchronous RL for language models: weight deltas through a bucket.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def run(
    job: Annotated[Path, typer.Argument(help="The job file, a Python file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides such as train.lr=2e-6.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Inference replicas.")] = 1,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = "torch",
    store: Annotated[
        str | None, typer.Option(help="file://, hf://buckets/… or s3://; a folder of the run.")
    ] = None,
    streams: Annotated[
        str | None, typer.Option(help="redis://… of your own; else one is started.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="First port; 0 takes free ones.")] = 7860,
    plain: Annotated[bool, typer.Option(help="Lines instead of the live view.")] = False,
) -> None:
    """Train a job on this machine, every service a process of its own."""
    from deltawire.cli.plan import RunOptions
    from deltawire.cli.run import run_job
    from deltawire.job.load import load_job
    from deltawire.job.resolve import resolve

    given = overrides or []
    options = RunOptions(
        job_path=job,
        overrides=given,
        runs_dir=runs,
        replicas=replicas,
        engine=engine,
        store=store,
        streams=streams,
        port=port,
    )
    raise typer.Exit(run_job(options, resolve(load_job(job), given).spec, plain=plain))


@app.command()
def status(
    urls: Annotated[
        list[str] | None,
        typer.Argument(help="Service URLs, token in DELTAWIRE_TOKEN; else those of a run here."),
    ] = None,
    run_id: Annotated[str, typer.Option("--run", help="Which run of this machine.")] = "latest",
    runs: Annotated[Path, typer.Option(help="Where run folders are.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what services say of themselves: those of the newest run here, unless told."""
    from deltawire.cli.status import show_status

    raise typer.Exit(show_status(urls or [], runs=runs, run=run_id, as_json=as_json))


app.command()(worker)
app.command()(rollouts)
app.add_typer(deltas.app, name="deltas")
job_commands.mount(app)


def main() -> None:
    """Run a command; errors of the tree are one sentence, not a traceback."""
    try:
        app()
    except DeltawireError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
