"""Whether new work from outside is taken."""

from collections.abc import Callable

from deltawire.protocol.control import ReplicaState
from deltawire.protocol.errors import EngineError, ReplicaBroken


class Admission:
    """Asked by every route that generates."""

    def __init__(self, state: Callable[[], ReplicaState]) -> None:
        self._state = state

    def check(self) -> None:
        """Raises EngineError while draining, ReplicaBroken while nothing may be served (503)."""
        match self._state():
            case "draining":
                raise EngineError("this replica is about to stop; ask another one")
            case "joining" | "broken" as state:
                raise ReplicaBroken(f"no trusted weights are loaded: {state}")
            case _:
                return
