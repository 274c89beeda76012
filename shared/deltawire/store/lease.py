"""Mutual exclusion for a store without conditional writes: a lease object and a settling time.

Fischer's rule (described in Lamport, "A fast mutual exclusion algorithm", 1987): look whether the
lease is free, write a nonce, wait, look again; whoever's nonce stands holds it. It is safe as long
as no write takes longer than the waiting time from the look before it. That cannot be promised
over a network, so the holder also verifies after each write. A lease that has not changed for
`abandoned_s`, as seen from here (no two clocks are compared), may be taken.
"""

import time
from collections.abc import Callable
from typing import Protocol

from deltawire.protocol.errors import Fenced


class LeaseObject(Protocol):
    """The object as the store sees it."""

    def look(self) -> str | None:
        """Its etag; None when there is none."""
        ...

    def write(self) -> str:
        """Write a fresh nonce; returns the etag it must have."""
        ...


class Lease:
    """Held from one write to the next, until somebody else takes it."""

    def __init__(
        self,
        lease_object: LeaseObject,
        *,
        name: str,
        settle_s: float,
        abandoned_s: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._object, self._name = lease_object, name
        self._settle_s, self._abandoned_s = settle_s, abandoned_s
        self._sleep, self._clock = sleep, clock
        self._mine: str | None = None

    def hold(self) -> None:
        """Return when the lease is ours. Raises Fenced when others keep winning it."""
        if self._mine is not None and self._object.look() == self._mine:
            return
        self._wait_until_free()
        for _ in range(_TRIES):
            self._mine = self._object.write()
            self._sleep(self._settle_s)
            if self._object.look() == self._mine:
                return
            self._wait_until_free()
        raise Fenced(f"{self._name} is being written by another writer; this one must stop")

    def _wait_until_free(self) -> None:
        seen = self._object.look()
        since = self._clock()
        while seen is not None and self._clock() - since < self._abandoned_s:
            self._sleep(self._settle_s)
            found = self._object.look()
            if found != seen:
                seen, since = found, self._clock()


_TRIES = 3
