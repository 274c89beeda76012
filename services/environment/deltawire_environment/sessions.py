"""Who is playing: leased sessions, how many there may be, and when one has been left behind.

    open ──attach──> attached ──socket cut──> cut ──attach──> attached
      └── idle_s ──> closed      └─ silent_s ─┘└── grace_s ──> closed

A session waits `grace_s` for its client after a cut only when that client has shown that it can
come back (it sends request ids). Cut sessions give way when the house is full.
"""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import JsonValue

from deltawire.job.transcript import Transcript
from deltawire.job.world import Episode, World
from deltawire.protocol.errors import CapacityReached, EnvironmentFault

REMEMBERED_ANSWERS = 4
"""Newest answers kept for a retried request id."""

Frame = dict[str, JsonValue]


@dataclass(slots=True, eq=False)
class Session:
    """One player. Its id is a capability: who knows it may attach."""

    id: str
    owned_by_socket: bool
    """Ends with its socket, unless the client can come back."""
    used_at: float
    """Monotonic seconds of the last request."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One request at a time."""
    attachment: int = 0
    """Counts attachments: a handler whose number is old has been replaced."""
    evict: Callable[[], None] | None = None
    """Closes the attached socket; None while no socket is attached."""
    resumable: bool = False
    answers: OrderedDict[str, Frame] = field(default_factory=OrderedDict)
    world: World | None = None
    episode: Episode | None = None
    transcript: Transcript | None = None
    episode_id: str | None = None
    step_count: int = 0
    closed: bool = False

    @property
    def attached(self) -> bool:
        return self.evict is not None

    def remember(self, request_id: str, frame: Frame) -> None:
        """Keep an answer, so that a retry gets the same one."""
        self.answers[request_id] = frame
        while len(self.answers) > REMEMBERED_ANSWERS:
            self.answers.popitem(last=False)

    def state(self) -> Frame:
        """What may be shown of it: never a secret of the world."""
        shown = self.episode.state() if self.episode is not None else {}
        return {**shown, "episode_id": self.episode_id, "step_count": self.step_count}


class SessionGone(EnvironmentFault):
    """No session has that id any more; its episode is lost."""


class Sessions:
    """All sessions of the service. One event loop, so no locks."""

    def __init__(
        self,
        *,
        limit: int,
        idle_s: float,
        silent_s: float,
        grace_s: float,
        close_episode: Callable[[Session], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.draining = False
        self.opened_total = 0
        self.reaped_total = 0
        self._idle_s, self._silent_s, self._grace_s = idle_s, silent_s, grace_s
        self._close_episode, self._clock = close_episode, clock
        self._live: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._live)

    def open(self, *, owned_by_socket: bool) -> Session:
        """A new session. Raises CapacityReached when the house is full or draining."""
        if self.draining:
            raise CapacityReached("the service is shutting down; ask another one")
        if len(self._live) >= self.limit and not self._make_room():
            raise CapacityReached(
                f"all {self.limit} sessions are taken; wait, or raise ENVIRONMENT_MAX_SESSIONS"
            )
        session = Session(
            id=secrets.token_hex(16), owned_by_socket=owned_by_socket, used_at=self._clock()
        )
        self._live[session.id] = session
        self.opened_total += 1
        return session

    def find(self, session_id: str) -> Session:
        """A live session by its id. Raises SessionGone."""
        session = self._live.get(session_id)
        if session is None:
            raise SessionGone("unknown session; it was closed or its time ran out")
        self.touch(session)
        return session

    def touch(self, session: Session) -> None:
        """It was used just now."""
        session.used_at = self._clock()

    def attach(self, session: Session, evict: Callable[[], None]) -> int:
        """Bind a socket. A client that comes back replaces its own half-dead socket."""
        if session.evict is not None:
            session.evict()
        session.evict = evict
        session.attachment += 1
        self.touch(session)
        return session.attachment

    def detach(self, session: Session, attachment: int) -> None:
        """Its socket is gone: close it, or let it wait for its client."""
        if attachment != session.attachment or session.closed:
            return
        session.evict = None
        self.touch(session)
        if session.owned_by_socket and not (session.resumable and self._grace_s > 0):
            self.close(session)

    def close(self, session: Session) -> None:
        """End it and give back what its episode holds. Closing twice is fine."""
        if self._live.pop(session.id, None) is None:
            return
        session.closed = True
        if session.evict is not None:
            session.evict()
        self._close_episode(session)

    def reap(self) -> int:
        """Close what has been left behind; how many."""
        now = self._clock()
        left = [s for s in self._live.values() if now - s.used_at > self._patience_s(s)]
        for session in left:
            if not session.lock.locked():  # a world that is still thinking is not idle
                self.close(session)
                self.reaped_total += 1
        return len(left)

    def close_all(self) -> None:
        """The end of the service."""
        for session in list(self._live.values()):
            self.close(session)

    def _patience_s(self, session: Session) -> float:
        if session.attached:
            return self._silent_s
        return self._grace_s if session.owned_by_socket else self._idle_s

    def _make_room(self) -> bool:
        cut = [s for s in self._live.values() if s.owned_by_socket and not s.attached]
        if not cut:
            return False
        self.close(min(cut, key=lambda session: session.used_at))
        self.reaped_total += 1
        return True
