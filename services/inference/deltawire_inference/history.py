"""What a replica applied."""

from collections import deque

from deltawire.protocol.control import AppliedUpdate

_UPDATES_KEPT = 50


class UpdateHistory:
    """The newest updates, oldest first, and their number."""

    def __init__(self) -> None:
        self.newest: deque[AppliedUpdate] = deque(maxlen=_UPDATES_KEPT)
        self.total = 0

    def add(self, update: AppliedUpdate) -> None:
        """One more version is live."""
        self.newest.append(update)
        self.total += 1
