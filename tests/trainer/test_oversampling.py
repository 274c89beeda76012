"""More groups are ordered than a step needs: the first to come home are taken."""

import asyncio
from pathlib import Path

from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams

from .player import Player
from .rig import RUN, make_job, make_settings, playing, train_to_the_end


async def test_a_group_that_never_comes_holds_nobody_up_when_more_were_ordered(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    job = make_job(base, max_staleness=0, oversample_groups=1, steps=4)
    player = Player(open_store(settings.store), streams, run_id=RUN, folder=tmp_path / "replica")
    training = asyncio.create_task(train_to_the_end(settings, job, streams))
    async with asyncio.timeout(60.0):
        while (held := await streams.claim("asleep", timeout_s=0.05)) is None:
            pass
    async with playing(player):
        status = await training

    assert status.state == "finished", status.reason
    assert held.ticket.ticket_id not in player.played
    assert [record.staleness_max for record in status.history] == [0] * 4
    assert status.groups.trained == 8
    assert status.groups.dropped["end_of_run"] >= 1
    assert (status.groups.open, status.groups.lost) == (0, 0)
