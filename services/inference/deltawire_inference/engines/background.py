"""Work beside sampling: decoding and checking must not take the core that makes tokens."""

import os
import sys
import threading

_NICENESS = 10


def yield_to_sampling() -> None:
    """Lower the priority of the calling thread, where the system has such a thing."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
