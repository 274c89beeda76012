"""Run a command that must not outlive whoever started it.

    python -m deltawire_inference.engines.vllm.leash COMMAND...

The parent holds our standard input open. When it closes, however the parent ended, the whole
process group is asked to stop and then killed. vLLM starts several processes; all of them are in
the group.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 10.0


def main(command: list[str]) -> int:
    """Run to the command's end and return its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group gets it too; we leave last
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_hold, daemon=True).start()
    status = child.wait()
    return 128 - status if status < 0 else status


def _hold() -> None:
    while os.read(0, 1):  # unbuffered: a reader's lock would spoil the interpreter's own end
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
