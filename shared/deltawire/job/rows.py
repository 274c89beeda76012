"""Rows of a data set: JSONL, a list of dicts, or a Hugging Face `datasets.Dataset`."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from deltawire.protocol.errors import JobError
from deltawire.protocol.rollouts import Task

Row = dict[str, JsonValue]

EVAL_SHARE = 10
"""One row in this many is held out for evaluation, unless rows name their own split."""

SPLIT_COLUMN = "split"


class Rows:
    """The rows of each split, in memory. The same task always gets the same row."""

    def __init__(self, source: object, *, folder: Path = Path()) -> None:
        """Raises JobError for a missing file, a line that is no JSON object, or no rows."""
        rows = _read(source, folder)
        if not rows:
            raise JobError("the data set is empty; a job needs at least one row")
        self._splits: dict[str, list[Row]] = {"train": [], "eval": []}
        for row in rows:
            split = row.get(SPLIT_COLUMN)
            name = split if isinstance(split, str) else _split_of(row)
            self._splits.setdefault(name, []).append(row)
        if not self._splits["train"]:
            self._splits["train"] = rows
        self.columns = sorted({column for row in rows for column in row})

    def names(self) -> list[str]:
        """Splits that hold rows."""
        return [name for name, rows in self._splits.items() if rows]

    def count(self, split: str) -> int:
        """Rows in a split."""
        return len(self._splits.get(split, ()))

    def pick(self, task: Task, rng: random.Random) -> Row:
        """The row of a task: the one given, the one at its index, or one drawn by its seed."""
        if task.row:
            return dict(task.row)
        rows = self._splits.get(task.split) or self._splits["train"]
        at = task.index % len(rows) if task.index is not None else rng.randrange(len(rows))
        return dict(rows[at])


def _split_of(row: Row) -> str:
    text = json.dumps(row, sort_keys=True, default=str)
    held_out = hashlib.sha256(text.encode()).digest()[0] % EVAL_SHARE == 0
    return "eval" if held_out else "train"


def _read(source: object, folder: Path) -> list[Row]:
    if isinstance(source, str | Path):
        return _read_lines(folder / Path(source).expanduser())
    if isinstance(source, Mapping):  # a DatasetDict
        return [
            {SPLIT_COLUMN: _our_split(str(name)), **row}
            for name, part in source.items()
            for row in _read(part, folder)
        ]
    if isinstance(source, Sequence | Iterable):
        rows = []
        for at, row in enumerate(source):
            if not isinstance(row, Mapping):
                raise JobError(f"row {at} of the data set is {type(row).__name__}, not a mapping")
            rows.append(dict(row))
        return rows
    raise JobError(
        f"a data set is a .jsonl path, a list of dicts or a datasets.Dataset; found "
        f"{type(source).__name__}"
    )


def _our_split(name: str) -> str:
    return "eval" if name in ("test", "validation", "eval") else name


def _read_lines(path: Path) -> list[Row]:
    if not path.is_file():
        raise JobError(f"no data set {path}; a path is relative to the job file")
    rows = []
    # Not splitlines(): a text may hold U+2028, which ends no line of JSON.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise JobError(f"{path.name}:{number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise JobError(f"{path.name}:{number} is not a JSON object")
        rows.append(row)
    return rows
