"""What happened in a run, one JSON line an event, written before it takes effect elsewhere.

The journal is the redo log between two checkpoints: it names the groups of every step, so after a
crash the steps since the last checkpoint are made again from the same groups (which the streams
still hold, un-acked) and end in the same weights. And it is what people read afterwards.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from deltawire.protocol.control import EvalRecord, StepRecord, SyncRecord
from deltawire.protocol.errors import MalformedMessage
from deltawire.protocol.wire_model import OpenWireModel


class TakenOver(OpenWireModel):
    """A trainer without the run's journal went on from the bucket's head."""

    kind: Literal["taken_over"] = "taken_over"
    step: int
    lineage: str


class Issued(OpenWireModel):
    """Tickets are about to be issued."""

    kind: Literal["issued"] = "issued"
    ids: list[str]


class Dropped(OpenWireModel):
    """A group was left out."""

    kind: Literal["dropped"] = "dropped"
    group_id: str
    reason: str
    adopted: bool = False
    """Its ticket was issued by an earlier trainer whose journal is gone."""


class Trained(OpenWireModel):
    """An optimizer step was made from these groups."""

    kind: Literal["trained"] = "trained"
    record: StepRecord
    live_version: int
    """The policy version the step started from."""
    groups: dict[str, list[int]]
    """Group id -> indices of the rollouts used, in the order of the batch."""


class Synced(OpenWireModel):
    """A version was committed."""

    kind: Literal["synced"] = "synced"
    step: int
    record: SyncRecord


class RolledBack(OpenWireModel):
    """Steps after this one could not be made again."""

    kind: Literal["rolled_back"] = "rolled_back"
    step: int


class Evaluated(OpenWireModel):
    """An evaluation came home, or as much of it as came in time."""

    kind: Literal["evaluated"] = "evaluated"
    record: EvalRecord


class Stopped(OpenWireModel):
    """Somebody asked for the end of the run: no process of it trains on."""

    kind: Literal["stopped"] = "stopped"
    reason: str


Event = Annotated[
    TakenOver | Issued | Dropped | Trained | Synced | RolledBack | Evaluated | Stopped,
    Field(discriminator="kind"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class Journal:
    """An append-only file. A line cut short by a crash is taken away on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b")
        self._mend()

    def append(self, event: Event) -> None:
        """Write an event and see it on disk."""
        self._file.write(event.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def events(self) -> Iterator[Event]:
        """Everything written so far, oldest first. Raises MalformedMessage for a line that this
        version does not know."""
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield _EVENT.validate_json(line)
                except ValidationError as error:
                    raise _unknown(self.path, number, line, error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mend(self) -> None:
        """Cut off what a crash left half written: at most the last line."""
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        last = whole[whole.rfind(b"\n", 0, max(0, end - 1)) + 1 : end]
        if last and not _is_json(last):
            end -= len(last)
        if end != len(whole):
            self._file.truncate(end)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _unknown(path: Path, number: int, line: bytes, error: ValidationError) -> MalformedMessage:
    found = error.errors(include_url=False, include_input=False)[0]
    return MalformedMessage(
        f"{path}, line {number}: {'.'.join(map(str, found['loc']))}: {found['msg']}; another "
        "version of deltawire wrote it: go on with that one, or move the run folder away and take "
        "the run over from its bucket (TRAINER_TAKE_OVER=true)",
        raw=line,
    )
