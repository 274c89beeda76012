"""A command on the leash ends with whoever held it, and its status is handed on."""

import subprocess
import sys
import time
from pathlib import Path

from deltawire_inference.engines.vllm.child import kill_leftover

LEASH = [sys.executable, "-m", "deltawire_inference.engines.vllm.leash"]


def start(*command: str, folder: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*LEASH, folder, *command], stdin=subprocess.PIPE, start_new_session=True
    )


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_status_of_the_command_is_handed_on() -> None:
    with start(sys.executable, "-c", "raise SystemExit(3)") as leash:
        assert leash.wait(60) == 3


def test_the_command_ends_when_its_holder_lets_go() -> None:
    with start("sleep", "600") as leash:
        wait_until(lambda: children_of(leash.pid))
        (command,) = children_of(leash.pid)
        leash.stdin.close()
        leash.wait(60)
        wait_until(lambda: not Path(f"/proc/{command}").exists())


SERVER = """
import signal, subprocess, sys
rank = subprocess.Popen(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"],
                        stdout=subprocess.PIPE)
rank.stdout.readline()
open(sys.argv[1], "w").write(str(rank.pid))
signal.sigwait({signal.SIGTERM})
"""


def test_a_rank_that_outlives_its_server_ends_and_its_memory_is_given_back(tmp_path: Path) -> None:
    memory, rank_file = tmp_path / "memory", tmp_path / "rank"
    memory.mkdir()
    (memory / "map-0.safetensors").write_text("x")
    command = [sys.executable, "-c", SERVER, str(rank_file)]
    with start(*command, folder=str(memory)) as leash:
        wait_until(lambda: rank_file.exists() and rank_file.read_text())
        rank = Path("/proc") / rank_file.read_text()
        leash.stdin.close()
        leash.wait(60)
        wait_until(lambda: not rank.exists() or ") Z " in (rank / "stat").read_text())
    assert not memory.exists()


def test_what_a_killed_predecessor_left_is_killed_by_its_record(tmp_path: Path) -> None:
    record = tmp_path / "vllm.pgid"
    with start("sleep", "600") as leash:
        wait_until(lambda: children_of(leash.pid))
        (command,) = children_of(leash.pid)
        birth = Path(f"/proc/{leash.pid}/stat").read_text().rpartition(")")[2].split()[19]
        record.write_text(f"{leash.pid} {int(birth) + 1}")  # the number of another process
        kill_leftover(record)
        assert leash.poll() is None

        record.write_text(f"{leash.pid} {birth}")
        kill_leftover(record)
        leash.wait(60)
        wait_until(lambda: not Path(f"/proc/{command}").exists())
        assert not record.exists()
