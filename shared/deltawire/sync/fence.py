"""Who may publish to a run: one owner at a time, numbered by an epoch that only rises.

The owner is a random id that a trainer keeps in a file beside its checkpoints, so that it knows its
run again after a crash. Each opening raises the epoch and writes it to latest.json at once: the
process that held the run before finds a higher epoch at its next commit and stops. The epoch is
part of every key, so what a dead process uploaded and never committed is never met again.
"""

import fcntl
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self

from deltawire.protocol.chain import Head
from deltawire.protocol.errors import Fenced

_OWNER_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to publish."""

    owner: str
    epoch: int

    def raised(self) -> "Claim":
        """The same owner's next epoch."""
        return replace(self, epoch=self.epoch + 1)


def claim_run(head: Head | None, *, owner: str, take_over: bool, now_s: float) -> Claim:
    """The claim with which `owner` may open the run. Raises Fenced when it is another's.

    A new run is claimed at epoch 1, an own one again at the next epoch, another's only with
    `take_over`.
    """
    if head is None:
        return Claim(owner=owner, epoch=1)
    if head.owner == owner or take_over:
        return Claim(owner=owner, epoch=head.epoch + 1)
    state = "is finished" if head.state == "finished" else "belongs to another trainer"
    raise Fenced(
        f"run {head.run_id!r} {state} (version {head.version}, epoch {head.epoch}, last written "
        f"{max(0.0, now_s - head.updated_at):.0f} s ago): choose another run id, or stop that "
        "trainer and take the run over"
    )


def check_claim(head: Head, claim: Claim) -> None:
    """Raise Fenced when `head` was written under another claim than this one's."""
    if (head.owner, head.epoch) != (claim.owner, claim.epoch):
        raise Fenced(
            f"run {head.run_id!r} was taken over: its epoch is {head.epoch}, this trainer holds "
            f"epoch {claim.epoch} and must stop; nothing of its last version became visible"
        )


class OwnerFile:
    """The owner id of a trainer, in a file that is locked while the process lives.

    The lock keeps a second process that was started on the same folder by mistake from passing as
    the same trainer. It goes with the process, however that ends.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise Fenced(f"{path} is held by a trainer process that still runs") from error
        self._file.seek(0)
        self.owner = self._file.read().decode("ascii", "replace").strip()
        if not self.owner:
            self.owner = new_owner()
            self._file.write(self.owner.encode("ascii"))
            self._file.flush()

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_owner() -> str:
    """A fresh random owner id."""
    return secrets.token_hex(_OWNER_BYTES)
