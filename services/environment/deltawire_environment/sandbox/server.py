"""The fork server: one process that forks a confined child for each program.

Started by forks.py as `python -I -m deltawire_environment.sandbox.server FD ROOT MODE`. On the
control socket (SOCK_SEQPACKET, JSON) come `{"fork": id, ...}` with two file descriptors and
`{"kill": id}`; back go `{"ready": ..., "private": ...}` and `{"ended": id, "status": code}`. When
the other end closes, the server ends, and as process 1 of its namespace takes every child with it.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from deltawire_environment.sandbox import child
from deltawire_environment.sandbox.confine import address_space_bytes, enter_world

MESSAGE_BYTES = 4096


class ForkServer:
    """Children by the id the pool gave them."""

    def __init__(self, control: socket.socket, *, private: bool, base_bytes: int) -> None:
        self._control, self._private, self._base_bytes = control, private, base_bytes
        self._pids: dict[int, int] = {}

    def serve(self) -> None:
        """Until the control socket closes."""
        wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._tell({"ready": True, "private": self._private})
        while True:
            ready = select.select([self._control.fileno(), wakeup_read], [], [])[0]
            if wakeup_read in ready:
                os.read(wakeup_read, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 2)
        if not data:
            return False
        order = json.loads(data)
        if "kill" in order:
            pid = self._pids.get(order["kill"])
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            self._fork(order, fds)
        for fd in fds:
            os.close(fd)
        return True

    def _fork(self, order: dict[str, int], fds: list[int]) -> None:
        pid = os.fork()
        if pid:
            self._pids[order["fork"]] = pid
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child.main(
            talk_fd=fds[0],
            output_fd=fds[1],
            private=self._private,
            address_space_bytes=self._base_bytes + order["memory_bytes"],
            cpu_s=order["cpu_s"],
        )

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            found = next((known for known, its in self._pids.items() if its == pid), None)
            if found is not None:
                del self._pids[found]
                self._tell({"ended": found, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._control.send(json.dumps(message).encode())


def main(argv: list[str]) -> None:
    """Enter namespaces when allowed, then serve."""
    control = socket.socket(fileno=int(argv[1]))
    child.preload()
    base_bytes = address_space_bytes()
    private = argv[3] == "private" and enter_world(Path(argv[2]))
    ForkServer(control, private=private, base_bytes=base_bytes).serve()


if __name__ == "__main__":
    main(sys.argv)
