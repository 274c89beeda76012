"""Reads what passes between a client and Redis, and writes down which appends Redis answered for.

Knows nothing of the producers and the trainer: what it saw is evidence about them.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from deltawire.streams import scripts

Reply = bytes | int | None | list["Reply"]

_SCRIPT, _FIRST_ARGUMENT, _TICKET_ID = 1, 7, 2
"""Of EVAL script 4 key key key key argument…: places in the request, and among the arguments."""


@dataclass(slots=True)
class Witness:
    """What was seen on every connection of a link."""

    acknowledged: Counter[str] = field(default_factory=Counter)
    """Group id -> how often Redis said that it is on the stream."""
    answers: int = 0

    def listen(self) -> "Conversation":
        """A new connection."""
        return Conversation(self)


class Conversation:
    """One connection: requests and replies in step."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._requests, self._replies = bytearray(), bytearray()
        self._appends: deque[str | None] = deque()

    def asked(self, chunk: bytes) -> None:
        """Bytes that went to Redis."""
        self._requests += chunk
        for request in take(self._requests):
            self._appends.append(_append_of(request))

    def answered(self, chunk: bytes) -> None:
        """Bytes that came from Redis."""
        self._replies += chunk
        for reply in take(self._replies):
            self._witness.answers += 1
            group_id = self._appends.popleft()
            if group_id is not None and reply == 1:
                self._witness.acknowledged[group_id] += 1


def _append_of(request: Reply) -> str | None:
    """The group id, when a request is the script that appends a group."""
    if not isinstance(request, list) or len(request) <= _FIRST_ARGUMENT + _TICKET_ID:
        return None
    if request[_SCRIPT] != scripts.FINISH.encode():
        return None
    group_id = request[_FIRST_ARGUMENT + _TICKET_ID]
    assert isinstance(group_id, bytes)
    return group_id.decode()


def take(buffer: bytearray) -> list[Reply]:
    """Whole values of the Redis protocol (RESP2) from the front of a buffer."""
    found: list[Reply] = []
    while True:
        try:
            value, end = _value(buffer, 0)
        except IndexError:
            return found
        found.append(value)
        del buffer[:end]


def _value(buffer: bytearray, start: int) -> tuple[Reply, int]:
    """The value at `start`, and where the next begins. IndexError while it is not all there."""
    stop = buffer.find(b"\r\n", start)
    if stop < 0:
        raise IndexError
    kind, head, after = buffer[start : start + 1], bytes(buffer[start + 1 : stop]), stop + 2
    if kind == b":":
        return int(head), after
    if kind in b"+-":
        return head, after
    size = int(head)
    if size < 0:
        return None, after
    if kind == b"$":
        if len(buffer) < after + size + 2:
            raise IndexError
        return bytes(buffer[after : after + size]), after + size + 2
    values: list[Reply] = []
    for _ in range(size):
        value, after = _value(buffer, after)
        values.append(value)
    return values, after
