"""What the control plane asks of a replica: look at the bucket, stop, go on."""

from fastapi import APIRouter
from pydantic import BaseModel

from deltawire.protocol.control import PAUSE, RESUME, UPDATE_WEIGHTS, NoticeReceipt, WeightNotice
from deltawire_inference.replica import Replica


class Paused(BaseModel):
    """What /pause and /resume answer."""

    paused: bool


def weight_routes(replica: Replica) -> APIRouter:
    """`/update_weights`, `/pause`, `/resume`."""
    router = APIRouter(tags=["weights"])

    @router.post(UPDATE_WEIGHTS, status_code=202)
    async def update_weights(notice: WeightNotice) -> NoticeReceipt:
        """New weights lie in the bucket. A hint: lost, doubled and late ones do no harm."""
        replica.notice(notice)
        return NoticeReceipt(accepted=True, serving=replica.engine.version)

    @router.post(PAUSE)
    async def pause() -> Paused:
        """Make no tokens; requests wait. Weights are followed all the same."""
        await replica.engine.pause()
        return Paused(paused=True)

    @router.post(RESUME)
    async def resume() -> Paused:
        """Go on."""
        await replica.engine.resume()
        return Paused(paused=False)

    return router
