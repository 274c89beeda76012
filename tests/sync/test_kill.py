"""kill -9 of the publishing process at 50 random moments: whoever follows ends on a committed,
verified version, and a restarted trainer goes on."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltawire.codec.digest import digest_full
from deltawire.protocol.errors import ObjectMissing
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.replay import empty_tensors, replay

KILLS = 50
LONGEST_LIFE_S = 0.1
"""Of a publisher that publishes without a pause; longer on a machine where none gets far so."""
OPENINGS = 5
"""One kill in so many may hit the founding or resuming of the run; the others hit a publish."""


@pytest.fixture
def forks(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that imported torch once and forks a publisher for each line it is given."""
    script = Path(__file__).with_name("publisher_forks.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_publisher_killed_at_any_moment_leaves_a_committed_verified_version(
    forks: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    moments = random.Random(0)
    store = LocalStore(tmp_path / "bucket")
    warm = _Replica(Follower(store, "run", tmp_path / "warm"))
    reached: list[int] = [-1]
    longest_life_s = LONGEST_LIFE_S
    assert forks.stdin is not None
    assert forks.stdout is not None

    for kill in range(KILLS):
        forks.stdin.write(f"{kill}\n")
        forks.stdin.flush()
        publisher = int(forks.stdout.readline())
        if kill % OPENINGS:
            assert forks.stdout.readline() == "publishing\n"
        time.sleep(moments.uniform(0, longest_life_s))
        os.kill(publisher, signal.SIGKILL)
        while (said := forks.stdout.readline()) == "publishing\n":
            pass
        assert said == f"ended by {signal.SIGKILL:d}\n"

        reached.append(warm.catch_up())
        cold = _Replica(Follower(store, "run", tmp_path / f"cold_{kill}"))
        assert cold.catch_up() == reached[-1]
        assert cold.digest == warm.digest
        got_on = reached[-1] > reached[-2]
        longest_life_s = max(LONGEST_LIFE_S, longest_life_s * (0.8 if got_on else 1.25))

    assert reached == sorted(reached)
    assert len(set(reached)) > KILLS / 10


class _Replica:
    """Follows by routes; recomputes the digest of what it holds in full each time."""

    def __init__(self, follower: Follower) -> None:
        self.version: int | None = None
        self.digest: str | None = None
        self._follower = follower

    def catch_up(self) -> int:
        """-1 while the run has no committed version."""
        try:
            head = self._follower.head()
        except ObjectMissing:
            return -1
        layout = self._follower.layout()
        if self.version is None:
            self._tensors = empty_tensors(layout)
        if self.version != head.version:
            held = None if self.version is None else digest_full(self._tensors.named_bits(), layout)
            route = self._follower.route(self.version, head.version)
            replay(self._follower.fetch(route), self._tensors, run_id="run", digest=held)
        self.version = head.version
        self.digest = str(digest_full(self._tensors.named_bits(), layout))
        assert self.digest == head.link_digest(head.version)
        return head.version
