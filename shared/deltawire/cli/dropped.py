"""Groups that were not trained on, each with its reason: `deltawire rollouts --dropped`, and those
that errors are to blame for among the rollouts of `--status error`."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.cli.trainer_face import get_json, is_url
from deltawire.protocol.errors import SettingsError

_JOURNAL = "journal.jsonl"
_UNUSABLE, _DEAD_LETTER = "unusable", "dead_letter"


def show_dropped(source: str, *, limit: int, as_json: bool) -> int:
    """Print them, newest first: all of a run folder, or the dead letters a trainer tells of."""
    rows = _dropped(source)[::-1][:limit]
    console = Console()
    if as_json:
        console.print_json(json.dumps(rows))
        return 0
    table = Table("group", "why it was left out")
    for row in rows:
        table.add_row(Text(row["group_id"]), Text(row["reason"]))
    console.print(table)
    return 0


def failed_groups(source: str) -> list[dict[str, Any]]:
    """The groups that errors left nothing of, newest first, as rows of the table of rollouts."""
    if not is_url(source) and not (Path(source) / _JOURNAL).exists():
        return []
    return [
        {
            "rollout_id": row["group_id"],
            "step": None,
            "reward": None,
            "status": "error",
            "reason": f"group dropped: {row['reason']}",
            "tokens": None,
            "oldest_version": None,
            "newest_version": None,
            "info": {},
        }
        for row in _dropped(source)[::-1]
        if row["reason"].startswith((_UNUSABLE, _DEAD_LETTER))
    ]


def unnamed_failures(url: str) -> str:
    """What a trainer only counts: groups dropped for errors, and the most frequent one; or ""."""
    status = get_json(url, "/status")
    count = status["groups"]["dropped"].get(_UNUSABLE, 0)
    why = status["error_reason"]
    return f"{count} groups dropped whole: {why or _UNUSABLE}" if count else ""


def _dropped(source: str) -> list[dict[str, str]]:
    return _dead_letters(source) if is_url(source) else _journaled(Path(source))


def _journaled(folder: Path) -> list[dict[str, str]]:
    """Oldest first. The step after a drop has its errors on its record, so it says why."""
    rows: list[dict[str, str]] = []
    unexplained: list[dict[str, str]] = []
    for event in _events(folder):
        if event["kind"] == "dropped":
            rows.append({"group_id": event["group_id"], "reason": event["reason"]})
            if event["reason"] == _UNUSABLE:
                unexplained.append(rows[-1])
        elif event["kind"] == "trained":
            why = event["record"].get("error_reason")
            for row in unexplained if why else ():
                row["reason"] = f"{_UNUSABLE}: {why}"
            unexplained.clear()
    return rows


def _events(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / _JOURNAL).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise SettingsError(
            f"{folder} has no {_JOURNAL} ({error.strerror}); name a run folder or a trainer's URL"
        ) from error
    # What comes after the last line's end is empty, or what a trainer at work has half written.
    return [json.loads(line) for line in lines[:-1]]


def _dead_letters(url: str) -> list[dict[str, str]]:
    letters = get_json(url, "/status")["dead_letters"]
    return [
        {"group_id": letter["id"], "reason": f"{_DEAD_LETTER}: {letter['reason']}"}
        for letter in letters
    ]
