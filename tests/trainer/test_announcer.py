"""Notices to replicas that others registered."""

from deltawire.protocol.control import ReplicaStatus, WeightNotice
from deltawire_trainer.announcer import announce


async def test_a_replica_that_registered_an_impossible_address_stops_nobody() -> None:
    replicas = [
        ReplicaStatus(
            replica_id=url, run_id="r", url=url, engine="torch", state="serving", version=None
        )
        for url in ("http://replica/\n", "http://ü..", "nowhere")
    ]
    notice = WeightNotice(repo_id="file:///bucket", filename="deltas/step_000001.safetensors")

    assert await announce(notice, replicas, token=None) == 0
