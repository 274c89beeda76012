"""Run a command that must not outlive whoever started it.

    python -m deltawire_inference.engines.vllm.leash FOLDER COMMAND...

The parent holds our standard input open. When it closes, however the parent ended, the whole
process group is asked to stop, then killed, and FOLDER, memory that nobody would give back, is
removed. vLLM starts several processes; all of them are in the group.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 10.0
_LOOK_S = 0.1


def main(folder: str, command: list[str]) -> int:
    """Run to the command's end and return its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group gets it too; we leave last
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    let_go = threading.Event()
    holding = threading.Thread(target=_hold, args=(folder, let_go), daemon=True)
    holding.start()
    status = child.wait()
    if let_go.is_set():
        holding.join()  # a rank may outlive its server; it ends with us
    return 128 - status if status < 0 else status


def _hold(folder: str, let_go: threading.Event) -> None:
    while os.read(0, 1):  # unbuffered: a reader's lock would spoil the interpreter's own end
        pass
    let_go.set()
    os.killpg(0, signal.SIGTERM)
    give_up_at = time.monotonic() + GRACE_S
    while time.monotonic() < give_up_at and not _is_last():
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _is_last() -> bool:
    """Whether nobody but us is left in the group (proc(5): state and group in the stat file)."""
    if sys.platform != "linux":
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(group) == os.getpgrp() and state != "Z" and path.parent.name != str(os.getpid()):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
