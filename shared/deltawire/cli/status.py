"""`deltawire status [URL…]`: what services say of themselves, in one table."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr
from rich.console import Console
from rich.table import Table

from deltawire.cli.local_run import find_run
from deltawire.control.client import ServiceClient
from deltawire.protocol.errors import RemoteError


class AnyStatus(BaseModel):
    """Whatever a service answers; its known fields are shown."""

    model_config = ConfigDict(extra="allow")

    service: str


_SHOWN = {
    "trainer": (
        "run_id",
        "job",
        "state",
        "step",
        "steps",
        "version",
        "waits_for",
        "store_budget",
        "memory",
    ),
    "inference": (
        "replica_id",
        "engine",
        "state",
        "version",
        "head_version",
        "swap_mode",
        "store_budget",
        "last_error",
    ),
    "environment": ("environment_id", "worlds", "active_sessions", "max_sessions", "draining"),
}


def show_status(urls: Sequence[str], *, runs: Path, run: str, as_json: bool) -> int:
    """Ask each URL; without any, the services of a run on this machine. 0 when all answered."""
    if urls:
        said = os.environ.get("DELTAWIRE_TOKEN")
        urls, token = [address_of(url) for url in urls], SecretStr(said) if said else None
    else:
        local = find_run(runs, run)
        urls, token = local.urls, local.token
    answers = asyncio.run(_ask(urls, token))
    console = Console()
    if as_json:
        console.print_json(json.dumps([_plain(answer) for answer in answers]))
    else:
        console.print(_table(urls, answers))
    return 1 if any(isinstance(answer, RemoteError) for answer in answers) else 0


def address_of(url: str) -> str:
    """`localhost:7860` is meant as http://localhost:7860."""
    return url if "://" in url else f"http://{url}"


async def _ask(urls: Sequence[str], token: SecretStr | None) -> list[AnyStatus | RemoteError]:
    async def one(url: str) -> AnyStatus | RemoteError:
        try:
            async with ServiceClient(url, token=token) as client:
                return await client.status(AnyStatus)
        except RemoteError as error:
            return error

    return list(await asyncio.gather(*(one(url) for url in urls)))


def _plain(answer: AnyStatus | RemoteError) -> dict[str, object]:
    return {"error": str(answer)} if isinstance(answer, RemoteError) else answer.model_dump()


def _table(urls: Sequence[str], answers: Sequence[AnyStatus | RemoteError]) -> Table:
    table = Table("service", "where", "state")
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, RemoteError):
            table.add_row("?", url, str(answer))
            continue
        said = answer.model_dump()
        facts = (
            f"{name} {said[name]}" for name in _SHOWN.get(answer.service, ()) if said.get(name)
        )
        table.add_row(answer.service, url, "\n".join([*facts, *_replicas(said)]))
    return table


def _replicas(said: dict[str, object]) -> list[str]:
    found = said.get("replicas")
    if not isinstance(found, list):
        return []
    head = said.get("version")
    lines = []
    for replica in found:
        served = replica.get("version")
        known = isinstance(head, int) and isinstance(served, int)
        lag = f"lag {head - served}" if known else "lag unknown"
        lines.append(f"replica {replica.get('replica_id')}: {replica.get('state')}, {lag}")
    return lines
