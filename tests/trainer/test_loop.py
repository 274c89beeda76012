"""The loop against real streams and a real bucket, with a tiny model."""

from pathlib import Path

from deltawire.protocol.versions import PolicyVersion
from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams

from .player import Player
from .rig import RUN, make_job, make_settings, playing, train_to_the_end


async def test_a_run_trains_to_its_end_and_accounts_for_every_group(
    tmp_path: Path, base: Path
) -> None:
    streams, settings = MemoryStreams(), make_settings(tmp_path)
    player = Player(open_store(settings.store), streams, run_id=RUN, folder=tmp_path / "replica")

    async with playing(player):
        status = await train_to_the_end(settings, make_job(base), streams)

    assert status.state == "finished", status.reason
    assert status.step == 6
    assert [record.version for record in status.history] == [1, 2, 3, 4, 5, 6]
    assert all(record.sync is not None for record in status.history)
    counts = status.groups
    assert counts.trained == 12
    assert (counts.open, counts.lost, counts.doubled) == (0, 0, 0)
    assert counts.issued == counts.trained + sum(counts.dropped.values())
    (replica,) = status.replicas
    assert (replica.version, replica.digest) == (status.version, status.digest)
    assert status.version == PolicyVersion(6)
