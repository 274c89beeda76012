"""The Hub's feed of changes in a bucket, as a wake-up: server-sent events, best effort.

A lost event harms nobody, since whoever is woken also polls. Where the feed is not served, or not
for this token, the thread ends and polling is left.
"""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from typing import cast

from deltawire.store.retry import backoff_s

log = logging.getLogger(__name__)

SILENCE_S = 90.0
"""The server pings every half minute; a stream that is silent for longer is dead."""
_REFUSED = (401, 403, 404, 501)
"""Not served here, or not for this token: ask no more."""


class ChangeFeed:
    """One stream in a daemon thread, reopened when it ends, until `close`."""

    def __init__(
        self, url: str, *, token: str | None, path: str, wake: Callable[[], object]
    ) -> None:
        self._request = urllib.request.Request(url, headers={"Accept": "text/event-stream"})
        if token:
            self._request.add_unredirected_header("Authorization", f"Bearer {token}")
        self._path, self._wake = path, wake
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltawire-changes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; it may take until the server's next ping."""
        self._closed.set()

    def _run(self) -> None:
        attempt = 0
        while not self._closed.is_set():
            try:
                self._follow()
                attempt = 0
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in _REFUSED:
                    log.info("change feed not served", extra={"status": error.code})
                    return
            except (OSError, HTTPException):
                pass  # cut, silent or unreachable: reopen
            self._closed.wait(backoff_s(attempt, jitter=1.0, asked_s=1.0))
            attempt += 1

    def _follow(self) -> None:
        """Until the stream ends. What happened before it was open is unknown, so wake first."""
        with urllib.request.urlopen(self._request, timeout=SILENCE_S) as opened:
            self._tell()
            for name, data in events(cast("Iterable[bytes]", opened)):
                if self._closed.is_set() or name == "reconnect":
                    return
                if name == "reset" or (name == "changes" and _touches(data, self._path)):
                    self._tell()

    def _tell(self) -> None:
        if not self._closed.is_set():
            self._wake()


def events(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of a server-sent stream; comments and pings are passed over."""
    name, data = "message", list[str]()
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        field, _, value = line.partition(":")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "message", []
        elif field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            data.append(value.removeprefix(" "))


def _touches(data: str, path: str) -> bool:
    """Whether a batch of changes names a path. What does not parse may be anything: yes."""
    try:
        changes = json.loads(data)["changes"]
        return any(change["path"] == path for change in changes)
    except (ValueError, KeyError, TypeError):
        return True
