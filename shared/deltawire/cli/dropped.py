"""`deltawire rollouts --dropped`: groups that were not trained on, each with its reason."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.cli.rollouts import get_json
from deltawire.protocol.errors import SettingsError

_JOURNAL = "journal.jsonl"


def show_dropped(source: str, *, limit: int, as_json: bool) -> int:
    """Print them, newest first: all of a run folder, or the dead letters a trainer tells of."""
    remote = source.startswith(("http://", "https://"))
    rows = (_dead_letters(source) if remote else _journaled(Path(source)))[::-1][:limit]
    console = Console()
    if as_json:
        console.print_json(json.dumps(rows))
        return 0
    table = Table("group", "why it was left out")
    for row in rows:
        table.add_row(Text(row["group_id"]), Text(row["reason"]))
    console.print(table)
    return 0


def _journaled(folder: Path) -> list[dict[str, str]]:
    try:
        lines = (folder / _JOURNAL).read_text().splitlines()
    except OSError as error:
        raise SettingsError(
            f"{folder} has no {_JOURNAL} ({error.strerror}); name a run folder or a trainer's URL"
        ) from error
    # A trainer at work may be in the middle of the last line.
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    return [
        {"group_id": event["group_id"], "reason": event["reason"]}
        for event in events
        if event["kind"] == "dropped"
    ]


def _dead_letters(url: str) -> list[dict[str, str]]:
    letters = get_json(url, "/status")["dead_letters"]
    return [
        {"group_id": letter["id"], "reason": f"dead_letter: {letter['reason']}"}
        for letter in letters
    ]
