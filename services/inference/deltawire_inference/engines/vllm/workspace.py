"""The folders of one vLLM child: one on disk, and one in memory for patches in passing."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from deltawire.protocol.errors import SettingsError

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 2**30
"""With less room than this (64 MiB in a container that was not told otherwise) disk is used."""
_MAX_SOCKET_CHARS = 100
"""A Unix socket's path may have 107."""


class Workspace:
    """Only this user may enter. What a predecessor left is removed when opened."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.socket = disk / "vllm.sock"
        name = f"deltawire-{os.getuid()}-{str(disk.resolve()).strip('/').replace('/', '-')}"
        in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES
        self.memory = _MEMORY / name[-200:] if in_memory else disk / "patches"
        if len(str(self.socket)) > _MAX_SOCKET_CHARS:
            raise SettingsError(f"{disk}: too long for a socket's path; choose a shorter folder")

    def open(self) -> None:
        """Make both folders, empty but for the record of a predecessor's processes.

        Raises:
            SettingsError: A folder belongs to somebody else.
        """
        for folder in (self.disk, self.memory):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                raise SettingsError(f"{folder} belongs to another user; choose another state_dir")
            folder.chmod(0o700)
        self.clear()

    def close(self) -> None:
        """Clear both, and give the one in memory back."""
        self.clear()
        with suppress(OSError):  # not there, or somebody put something in it
            self.memory.rmdir()

    def clear(self) -> None:
        """Remove patches, merged checkpoints and adapters."""
        for kind in ("checkpoint", "merged", "adapter"):
            for path in self.disk.glob(f"{kind}-*"):
                shutil.rmtree(path, ignore_errors=True)
        for path in self.memory.glob("*"):
            path.unlink(missing_ok=True)
