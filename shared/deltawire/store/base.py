"""The store seam: named bytes in a bucket. Knows nothing of deltas.

A store is rooted at ``{bucket}/{prefix}``; keys are plain relative paths below it. Every
implementation passes the same contract tests (tests/store/). Calls are synchronous and safe to use
from several threads; async code wraps them in ``asyncio.to_thread``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from deltawire.protocol.errors import InvalidKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store knows of an object."""

    key: str
    bytes: int
    sha256: str | None = None
    """Where the store keeps it; never trusted instead of checking."""
    xet_hash: str | None = None
    etag: str | None = None
    """Opaque; changes when the object does."""
    modified_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBudget:
    """Calls made in the store's rate window, and how many it allows (None: no limit known)."""

    calls: int
    window_s: float
    allowed: int | None

    def as_numbers(self) -> dict[str, float]:
        """As a status shows it; `allowed` only where there is a limit."""
        numbers = {"calls": float(self.calls), "window_s": self.window_s}
        return numbers if self.allowed is None else {**numbers, "allowed": float(self.allowed)}


class Store(Protocol):
    """Objects by key. Raises only StoreError and its children."""

    @property
    def uri(self) -> str:
        """Where it is, without secrets: what notices carry as repo_id."""
        ...

    def put(self, key: str, source: Path) -> ObjectInfo:
        """Upload a file. It becomes visible whole or not at all. ObjectExists when taken."""
        ...

    def fetch(
        self, key: str, target: Path, *, size_bytes: int | None = None, xet_hash: str | None = None
    ) -> ObjectInfo:
        """Download into `target` (atomically). Refuses more than `size_bytes`. ObjectMissing."""
        ...

    def read(self, key: str, *, max_bytes: int = 16 * 2**20) -> tuple[bytes, ObjectInfo]:
        """A small object whole, with its etag. ObjectMissing; StoreError when it is larger."""
        ...

    def swap(self, key: str, body: bytes, *, expect: str | None) -> ObjectInfo:
        """Write a small object if its etag is still `expect` (None: if there is none yet).

        Raises Fenced when somebody else wrote it meanwhile. Where the store has no conditional
        put this is verify-after-write, and the store says so in its docstring.
        """
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """What is known of an object; None when there is none."""
        ...

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose key begins with `prefix`, sorted by key."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are no error."""
        ...

    def budget(self) -> StoreBudget:
        """Calls used of what the store allows."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class Watch(Protocol):
    """A wake-up that was asked for."""

    def close(self) -> None:
        """Ask no more."""
        ...


@runtime_checkable
class Watchable(Protocol):
    """A store that can tell of changes. Best effort: whoever watches polls as well."""

    def watch(self, key: str, wake: Callable[[], object]) -> Watch:
        """Call `wake`, from another thread, when the object may have changed."""
        ...


_MAX_KEY_CHARS = 512


def check_key(key: str) -> str:
    """A key is a plain relative path: no scheme, no '..', no absolute path, no control signs."""
    parts = key.split("/")
    fine = (
        0 < len(key) <= _MAX_KEY_CHARS
        and all(part not in ("", ".", "..") for part in parts)
        and all(c.isascii() and (c.isalnum() or c in "._-/") for c in key)
    )
    if not fine:
        raise InvalidKey(f"{key!r} is not a plain relative key of letters, digits, '.', '_', '-'")
    return key
