"""A process that has imported everything and forks services on demand.

A service started afresh spends five to eight seconds of a core on importing torch; hundreds of
restarts would test little else. A fork is a process of its own all the same, with its own signals,
sockets and memory.

Reads one JSON line an order: {"module", "argv", "environ", "log"}. Writes one a piece of news:
{"started": pid} in the order of the orders, and {"ended": pid, "code": code}.
"""

import json
import os
import random
import runpy
import select
import sys
import traceback
from typing import Any

from deltawire.cli.children import end_with_launcher

_LOOK_S = 0.05


def preload() -> None:
    """Import what the services import."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    import deltawire.cli.main
    import deltawire.cli.worker
    import deltawire.codec.kernels_numba  # noqa: F401

    assert AutoModelForCausalLM
    assert LlamaForCausalLM


def serve() -> None:
    """Fork on order until the orders end."""
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    rest = b""
    while True:
        readable, _, _ = select.select([orders], [], [], _LOOK_S)
        if readable:
            heard = orders.read(65536)
            if not heard:
                return
            *lines, rest = (rest + heard).split(b"\n")
            for line in lines:
                _tell({"started": _fork(json.loads(line))})
        _reap()


def _tell(news: dict[str, int]) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _be(order)
        finally:
            os._exit(code)
    return pid


def _be(order: dict[str, Any]) -> int:
    """Become the service."""
    end_with_launcher()
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(order["environ"])
    random.seed()
    sys.argv = [order["module"], *order["argv"]]
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:  # noqa: BLE001 - the border of the process
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    preload()
    _tell({"started": 0})
    serve()
