"""`deltawire worker` and `deltawire rollouts`: make rollouts, and look at them."""

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from pydantic import SecretStr

from deltawire.protocol.errors import SettingsError


def worker(
    streams: Annotated[
        str, typer.Option(envvar="WORKER_STREAMS", help="redis://…, or https://… of the trainer.")
    ],
    store: Annotated[str, typer.Option(envvar="WORKER_STORE", help="The run's bucket.")],
    run_id: Annotated[str, typer.Option(envvar="WORKER_RUN_ID", help="The run.")],
    inference: Annotated[
        str, typer.Option(envvar="WORKER_INFERENCE", help="URLs of replicas, commas between.")
    ],
    environment: Annotated[
        str, typer.Option(envvar="WORKER_ENVIRONMENT", help="URLs of environments.")
    ],
    cache_dir: Annotated[
        Path, typer.Option(envvar="WORKER_CACHE_DIR", help="Where the tokenizer is kept.")
    ] = Path("~/.cache/deltawire/worker"),
    concurrency: Annotated[
        int, typer.Option(envvar="WORKER_CONCURRENCY", min=1, help="Episodes at a time.")
    ] = 16,
    drain_s: Annotated[
        float, typer.Option(envvar="WORKER_DRAIN_S", help="Seconds to finish in after SIGTERM.")
    ] = 30.0,
    enough: Annotated[
        float,
        typer.Option(
            envvar="WORKER_ENOUGH", help="Share of a group after which the rest are stragglers."
        ),
    ] = 1.0,
    grace_s: Annotated[
        float, typer.Option(envvar="WORKER_GRACE_S", help="How long stragglers may still take.")
    ] = 0.0,
    oversample: Annotated[
        int, typer.Option(envvar="WORKER_OVERSAMPLE", min=0, help="Episodes started beyond need.")
    ] = 0,
    private_spaces: Annotated[
        bool,
        typer.Option(
            envvar="WORKER_PRIVATE_SPACES", help="Show HF_TOKEN to the proxies of private Spaces."
        ),
    ] = False,
) -> None:
    """Produce rollouts for a run. The shared token is read from DELTAWIRE_TOKEN."""
    from deltawire.cli.worker import WorkerOptions, run_worker
    from deltawire.rollout.group import StragglerPolicy

    options = WorkerOptions(
        streams=streams,
        store=store,
        run_id=run_id,
        inference=urls_in(inference),
        environment=urls_in(environment),
        cache_dir=cache_dir.expanduser(),
        concurrency=concurrency,
        drain_s=drain_s,
        stragglers=StragglerPolicy(enough=enough, grace_s=grace_s, oversample=oversample),
        token=_secret("DELTAWIRE_TOKEN"),
        hub_token=_secret("HF_TOKEN"),
        private_spaces=private_spaces,
    )
    raise typer.Exit(run_worker(options))


def rollouts(
    source: Annotated[
        str, typer.Argument(help="A run folder, or the URL of a trainer.")
    ] = "runs/latest",
    show: Annotated[
        str, typer.Option(help="Id of one rollout to read in full, as in the table.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 32,
    status: Annotated[str, typer.Option(help="Only ok, truncated or error.")] = "",
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Groups that were not trained on, with the reason.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show rollouts: rewards, versions, and what was said, tokens that train marked."""
    from deltawire.cli.dropped import show_dropped
    from deltawire.cli.rollouts import show_rollouts

    if dropped:
        raise typer.Exit(show_dropped(source, limit=limit, as_json=as_json))
    raise typer.Exit(show_rollouts(source, show=show, limit=limit, status=status, as_json=as_json))


def urls_in(text: str) -> list[str]:
    """Addresses with commas between. Raises SettingsError."""
    urls = [url.strip().rstrip("/") for url in text.split(",") if url.strip()]
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https"):
            raise SettingsError(f"{url!r} is no http:// or https:// address")
    if not urls:
        raise SettingsError("at least one URL is needed for --inference and for --environment")
    return urls


def _secret(variable: str) -> SecretStr | None:
    value = os.environ.get(variable)
    return SecretStr(value) if value else None
