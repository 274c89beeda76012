"""`deltawire deltas`: look into a run's bucket, or a lone file, and take things out of it."""

from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltawire.sync.follower import Follower

app = typer.Typer(
    name="deltas",
    help="Look into a run's weights in a bucket, or into a lone file.",
    no_args_is_help=True,
)

Store = Annotated[
    str, typer.Argument(help="file:///folder, hf://buckets/owner/name/prefix or s3://bucket.")
]
Target = Annotated[str, typer.Argument(help="A store, or a lone .safetensors file.")]
RunId = Annotated[
    str | None, typer.Option("--run-id", help="The run; the only one of the store if left out.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Where downloads are kept; else a temporary folder.")
]
Manifest = Annotated[
    Path | None,
    typer.Option(help="run.json of a lone file; found beside its folder if it lies in a bucket."),
]


class ToEncoding(StrEnum):
    """What `convert` writes."""

    SEED = "seed"
    COMPACT = "compact"
    CLASSES = "classes"


@app.command("ls")
def list_links(store: Store, run_id: RunId = None, cache: Cache = None) -> None:
    """List the chain: version, kind, bytes, density, age, and who needs each object."""
    from deltawire.cli.delta_views import show_chain

    with _following(store, run_id, cache) as follower:
        show_chain(follower.head())


@app.command()
def inspect(
    target: Target,
    version: Annotated[
        int | None, typer.Option(help="Which version's delta of a store; the newest if left out.")
    ] = None,
    run_id: RunId = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw density by layer into this PNG.")
    ] = None,
    manifest: Manifest = None,
    cache: Cache = None,
) -> None:
    """Show what a delta changes: per tensor counts, density, and how far weights moved."""
    from deltawire.cli.delta_files import inspect_lone, inspect_version
    from deltawire.cli.delta_views import plot_density, show_changes

    if _is_file(target):
        header, tensors = inspect_lone(Path(target), manifest)
    else:
        with _following(target, run_id, cache) as follower:
            header, tensors = inspect_version(follower, version)
    show_changes(header, tensors)
    if plot is not None:
        plot_density(header, tensors, plot)
        typer.echo(f"drawn: {plot}")


@app.command()
def verify(
    target: Target, run_id: RunId = None, manifest: Manifest = None, cache: Cache = None
) -> None:
    """Replay the chain with full digests; exit code 1 when an object is not what it should be."""
    from deltawire.cli.delta_files import check_lone
    from deltawire.sync.audit import audit

    if _is_file(target):
        typer.echo(check_lone(Path(target), manifest))
        return
    sound = True
    with _following(target, run_id, cache) as follower:
        for verdict in audit(follower):
            sound = sound and not verdict.problem
            typer.echo(f"{verdict.problem or 'ok':<6} {verdict.link.key}")
        head = follower.head()
    typer.echo(f"version {head.version}: {'sound' if sound else 'NOT sound'}")
    raise typer.Exit(0 if sound else 1)


@app.command()
def merge(
    store: Store,
    first: Annotated[int, typer.Option("--from", help="The version the file is based on.")],
    last: Annotated[int, typer.Option("--to", help="The version it leads to.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    run_id: RunId = None,
    cache: Cache = None,
) -> None:
    """Merge consecutive deltas into one file, for a replica that is behind."""
    from deltawire.sync.export import merge_versions

    with _following(store, run_id, cache) as follower:
        links = follower.head().links
        report = merge_versions(follower, first, last, out)
    single = sum(
        link.bytes for link in links if link.kind == "delta" and first < link.version <= last
    )
    typer.echo(
        f"{out}: {report.bytes:,} bytes for versions {first} to {last}, "
        f"{report.header.num_changed:,} changes; the single deltas have {single:,} bytes"
    )


@app.command()
def gc(
    store: Store,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    grace_s: Annotated[
        float, typer.Option(help="Age in seconds from which an unlinked object goes.")
    ] = 900.0,
    keep_versions: Annotated[
        int, typer.Option(min=1, help="For the dry run: what the trainer's retention keeps.")
    ] = 64,
    run_id: RunId = None,
) -> None:
    """Remove objects that latest.json does not name: leftovers of crashes, links the trainer
    dropped. Links themselves are dropped by the trainer only; the dry run says which it would."""
    import time

    from deltawire.protocol.layout import in_run
    from deltawire.sync.retention import may_be_arriving, plan_links, plan_sweep

    with _following(store, run_id, None) as follower:
        head = follower.head()
        listing = follower.store.list(in_run(head.run_id, ""))
        left = plan_sweep(
            listing, head, now_s=time.time(), grace_s=grace_s, arriving=may_be_arriving(head)
        )
        for info in left:
            typer.echo(
                f"{'would remove' if dry_run else 'removed'} {info.key} ({info.bytes:,} bytes)"
            )
        if dry_run:
            for link in plan_links(head, keep_versions=keep_versions).drop:
                typer.echo(f"the trainer may unlink {link.key} ({link.bytes:,} bytes)")
        else:
            follower.store.delete([info.key for info in left])
    typer.echo(f"{len(left)} objects, {sum(info.bytes for info in left):,} bytes")


@app.command()
def export(
    store: Store,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    version: Annotated[
        int | None, typer.Option(help="Which version; the newest if left out.")
    ] = None,
    merge_adapter: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA run: the adapter merged into the base.")
    ] = False,
    run_id: RunId = None,
    cache: Cache = None,
) -> None:
    """Write a version as a plain checkpoint folder that `from_pretrained` opens; of a LoRA run as
    an adapter folder that `peft` opens, or merged."""
    from deltawire.sync.export import export_adapter, export_checkpoint

    with _following(store, run_id, cache) as follower:
        wanted = follower.head().version if version is None else version
        adapts = follower.manifest().adapter is not None
        as_adapter = adapts and not merge_adapter
        digest = (export_adapter if as_adapter else export_checkpoint)(follower, wanted, out)
    form = ", a PEFT adapter" if as_adapter else ", the adapter merged in" if adapts else ""
    typer.echo(f"{out}: version {wanted}{form}, digest {digest}")


@app.command()
def convert(
    target: Target,
    to: Annotated[ToEncoding, typer.Option(help="The encoding to write.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    version: Annotated[int | None, typer.Option(help="Which version's delta of a store.")] = None,
    run_id: RunId = None,
    manifest: Manifest = None,
    cache: Cache = None,
) -> None:
    """Write a delta in another encoding."""
    from deltawire.cli.delta_files import layout_of
    from deltawire.sync.export import convert_file, convert_version

    if _is_file(target):
        path = Path(target)
        report = convert_file(path, layout_of(path, manifest), out, encoding=to.value)
    else:
        with _following(target, run_id, cache) as follower:
            wanted = follower.head().version if version is None else version
            report = convert_version(follower, wanted, out, encoding=to.value)
    typer.echo(f"{out}: {report.encoding}, {report.bytes:,} bytes")


def _is_file(target: str) -> bool:
    return target.endswith(".safetensors")


@contextmanager
def _following(store: str, run_id: str | None, cache: Path | None) -> "Iterator[Follower]":
    """A follower of one run, with its store and its cache, for the time of a command."""
    import tempfile

    from deltawire.cli.delta_files import only_run
    from deltawire.store.open import open_store
    from deltawire.sync.follower import Follower

    opened = open_store(store)
    try:
        with tempfile.TemporaryDirectory(prefix="deltawire-deltas-") as folder:
            run = only_run(opened) if run_id is None else run_id
            yield Follower(opened, run, cache or Path(folder))
    finally:
        opened.close()
