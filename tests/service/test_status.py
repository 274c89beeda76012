"""GET /status answers whatever the numbers have become."""

import math

import httpx

from deltawire.protocol.control import ReplicaStatus
from deltawire.service.app import create_service_app
from deltawire.service.metrics import Metrics


async def test_a_number_that_is_none_does_not_hide_the_status() -> None:
    async def status() -> ReplicaStatus:
        return ReplicaStatus(
            replica_id="r",
            run_id="run",
            engine="torch",
            state="serving",
            version=None,
            tokens_per_s=math.nan,
        )

    app = create_service_app(
        title="any", status=status, unready=lambda: "", metrics=Metrics("any"), token=None
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://service"
    ) as http:
        answer = await http.get("/status")

    assert answer.status_code == 200
    assert math.isnan(ReplicaStatus.model_validate_json(answer.content).tokens_per_s)
