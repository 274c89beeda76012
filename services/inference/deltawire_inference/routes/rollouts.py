"""Run episodes now, for whoever asks; nothing goes over the streams."""

import uuid

from fastapi import APIRouter, Request
from pydantic import Field

from deltawire.protocol.generation import Sampling
from deltawire.protocol.rollouts import RolloutGroup, Task, Ticket
from deltawire.protocol.versions import PolicyVersion
from deltawire.protocol.wire_model import WireModel
from deltawire_inference.admission import Admission
from deltawire_inference.production import Production
from deltawire_inference.routes.disconnect import while_connected


class RolloutOrder(WireModel):
    """What to play. All but the seed has a default: `{"task": {"seed": 3}}` is an order."""

    task: Task = Task()
    group_size: int = Field(1, ge=1, le=256)
    sampling: Sampling = Sampling()
    max_turns: int = Field(1, ge=1)
    max_tokens: int = Field(1024, ge=1)
    policy_version: PolicyVersion | None = None
    deadline_s: float = Field(120.0, gt=0)


def rollout_routes(production: Production, admission: Admission, *, run_id: str) -> APIRouter:
    """`POST /rollouts`."""
    router = APIRouter(tags=["rollouts"])

    @router.post("/rollouts")
    async def rollouts(request: Request, order: RolloutOrder) -> RolloutGroup:
        """One group of episodes of a task, finished."""
        admission.check()
        ticket = Ticket(
            ticket_id=f"order-{uuid.uuid4().hex[:12]}",
            run_id=run_id,
            task=order.task,
            group_size=order.group_size,
            sampling=order.sampling,
            max_turns=order.max_turns,
            max_tokens=order.max_tokens,
            policy_version=order.policy_version,
            deadline_s=order.deadline_s,
            purpose="eval",
        )
        return await while_connected(request, production.group(ticket))

    return router
