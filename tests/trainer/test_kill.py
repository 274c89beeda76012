"""kill -9 of the trainer service at any moment of a publish: every replica ends on a committed,
verified version, nothing that is linked is damaged, and a restarted trainer goes on.

Five kills, one for each phase; DELTAWIRE_KILLS=50 spreads as many over all of them, and goes over
S3 too. DELTAWIRE_SEED=1 chooses other moments.
"""

import asyncio
import json
import os
import random
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from deltawire.codec.apply import LiveTensors
from deltawire.codec.digest import digest_full
from deltawire.protocol.chain import Head
from deltawire.protocol.errors import StreamUnavailable
from deltawire.store.base import Store
from deltawire.store.open import open_store
from deltawire.streams.open import open_trainer_streams
from deltawire.sync.audit import audit
from deltawire.sync.follower import Follower
from deltawire.sync.loop_follower import ModelFollower
from deltawire.sync.model_weights import named_weights

from .conftest import tiny_llama
from .player import Player
from .rig import make_job, make_settings, playing

KILLS = int(os.environ.get("DELTAWIRE_KILLS", "5"))
SEED = int(os.environ.get("DELTAWIRE_SEED", "0"))
KINDS = ["file"] if KILLS <= 5 else ["file", "s3"]
PHASES = ("diff", "encode", "upload", "commit", "announce")
LIFE_S = 300.0
"""Generous: resuming and two steps take a second or two on an idle machine."""

pytestmark = pytest.mark.timeout(LIFE_S + 60 * KILLS)


class Trainers:
    """Whole trainer services, one after another, out of one process that imported torch."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._alive: int | None = None

    async def start(self, **fate: object) -> int:
        """Its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fate).encode() + b"\n")
        self._alive = int((await self._told("pid"))[0])
        return self._alive

    async def ended(self) -> tuple[int, str]:
        """(the signal that ended it, the phase it was in)"""
        number, phase = await self._told("ended")
        self._alive = None
        return int(number), phase

    async def close(self) -> None:
        """End what still lives."""
        assert self._process.stdin is not None
        if self._alive is not None:
            os.kill(self._alive, signal.SIGKILL)
        self._process.stdin.close()
        assert await self._process.wait() == 0

    async def _told(self, about: str) -> list[str]:
        assert self._process.stdout is not None
        async with asyncio.timeout(LIFE_S):
            line = await self._process.stdout.readline()
        word, *rest = line.decode().split()
        assert word == about, line
        return rest


@asynccontextmanager
async def forking(settings_file: Path, marks: Path) -> AsyncIterator[Trainers]:
    script = Path(__file__).with_name("trainer_forks.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(str(script), str(settings_file), str(marks)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    trainers = Trainers(process)
    try:
        yield trainers
    finally:
        await trainers.close()


class Warm:
    """A replica that stays, and goes on by deltas."""

    def __init__(self, store: Store, run_id: str, folder: Path) -> None:
        self._follower = ModelFollower(Follower(store, run_id, folder))
        self._model = tiny_llama(seed=5).bfloat16()

    def digest_at_head(self) -> tuple[int, str]:
        """Catch up; the version, and a full digest over what the model then holds."""
        version = self._follower.apply_to(self._model)
        layout = self._follower.follower.layout()
        live = LiveTensors(named_weights(self._model), layout)
        return version, str(digest_full(live.named_bits(), layout))


class Steady(Player):
    """Goes on when the streams answer late, as a producer does."""

    async def run(self) -> None:
        while not self.stopped:
            with suppress(StreamUnavailable):
                await super().run()


def fates(kills: int) -> list[dict[str, object]]:
    """Each phase in turn, at a random point of it, up to two versions into a life."""
    random_numbers = random.Random(SEED)
    return [
        {
            "phase": PHASES[kill % len(PHASES)],
            "after": random_numbers.randrange(3),
            "share": random_numbers.uniform(0.0, 0.9),
        }
        for kill in range(kills)
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_trainer_killed_at_any_moment_of_a_publish_goes_on_where_replicas_stand(
    tmp_path: Path,
    base: Path,
    redis_url: str,
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    run_id = f"kill-{uuid.uuid4().hex[:12]}"
    uri = f"file://{tmp_path}/bucket"
    if kind == "s3":
        uri = f"s3://{request.getfixturevalue('s3_bucket')}/weights"
    job = make_job(base, steps=10_000, checkpoint_every=2)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    settings = make_settings(
        tmp_path, run_id=run_id, store=uri, streams=redis_url, job=tmp_path / "job.json", port=0
    )
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    store = open_store(uri)
    streams = open_trainer_streams(redis_url, run_id=run_id)
    warm = Warm(store, run_id, tmp_path / "warm")
    player = Steady(store, streams, run_id=run_id, folder=tmp_path / "player")
    fell: Counter[str] = Counter()
    reached = [-1]

    async with forking(tmp_path / "settings.json", tmp_path / "marks") as trainers, playing(player):
        for number, fate in enumerate(fates(KILLS)):
            await trainers.start(**fate)
            ended_by, phase = await trainers.ended()
            assert ended_by == signal.SIGALRM
            fell[phase] += 1
            head = await agreed(store, run_id, tmp_path / f"cold_{number}", player)
            assert warm.digest_at_head() == (head.version, head.link_digest(head.version))
            assert head.version >= reached[-1]
            reached.append(head.version)

        pid = await trainers.start()
        async with asyncio.timeout(LIFE_S):
            while player.version < reached[-1] + 2:  # noqa: ASYNC110 - the bucket tells nobody
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert (await trainers.ended())[0] == signal.SIGKILL
        await agreed(store, run_id, tmp_path / "cold_last", player)
    await streams.close()
    store.close()
    sys.stdout.write(f"{kind}: kills by phase {dict(fell)}, versions reached {reached}\n")


async def agreed(store: Store, run_id: str, folder: Path, player: Player) -> Head:
    """The committed state, once the replica that plays is there and every linked object was found
    sound."""
    follower = Follower(store, run_id, folder)
    head = follower.head()
    async with asyncio.timeout(LIFE_S):
        while player.version != head.version:  # noqa: ASYNC110 - the player tells nobody
            await asyncio.sleep(0.01)
    assert player.digest == head.link_digest(head.version)
    problems = [(v.link.key, v.problem) for v in audit(follower) if v.problem]
    assert not problems
    return head
