"""Token ids in, token ids with logprobs and version spans out."""

from fastapi import APIRouter, Request

from deltawire.protocol.control import GENERATE
from deltawire.protocol.generation import GenerateRequest, GenerateResponse
from deltawire_inference.admission import Admission
from deltawire_inference.replica import Replica
from deltawire_inference.routes.disconnect import while_connected


def generate_routes(replica: Replica, admission: Admission) -> APIRouter:
    """`POST /v1/generate`; 409 with Retry-After for a version that is not served."""
    router = APIRouter(tags=["generate"])

    @router.post(GENERATE)
    async def generate(request: Request, wanted: GenerateRequest) -> GenerateResponse:
        admission.check()
        return await while_connected(request, replica.generate(wanted))

    return router
