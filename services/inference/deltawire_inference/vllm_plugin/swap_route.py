"""One HTTP route for a whole swap: pause, scatter, label, go on, with nothing else in between.

The same through vLLM's own routes is four requests, and its `/pause` sleeps 20 ms before it
answers, all of it time in which no token is made. `vllm.endpoint_plugins` loads this where
`VLLM_PLUGINS` names it, as the replica's service does; without it the service makes the four
requests.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.datastructures import State

SWAP_PLUGIN = "deltawire_swap"
"""Its name in `VLLM_PLUGINS`."""
SWAP_PATH = "/deltawire/swap"
APPLY_METHOD = "deltawire_apply"
"""Of our worker extension; a dict with `refused` from a rank that wrote nothing."""


class SwapOrder(BaseModel):
    """What to swap in, and what running requests do meanwhile."""

    key: str
    label: str
    mode: Literal["keep", "wait", "abort"]
    clear_cache: bool


class SwapRoute:
    """The endpoint plugin. vLLM makes one per API server."""

    name = SWAP_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        router = APIRouter()

        @router.post(SWAP_PATH)
        async def swap(order: SwapOrder, request: Request) -> dict[str, object]:
            return await swap_weights(request.app.state.deltawire_core, order)

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Hold on to the engine core's client."""
        del args
        state.deltawire_core = engine_client.engine_core


async def swap_weights(core: Any, order: SwapOrder) -> dict[str, object]:
    """Swap between two steps. Generation goes on unless ranks disagree about the patch.

    Args:
        core: vLLM's asynchronous engine core client.
        order: See SwapOrder.

    Returns:
        `results`, one per rank, and `pause_s`, from the end of the last step under the old weights.
    """
    await core.pause_scheduler_async(mode=order.mode, clear_cache=order.clear_cache)
    started = time.perf_counter()
    results = await core.collective_rpc_async(APPLY_METHOD, args=(order.key,))
    refused = sum("refused" in result for result in results)
    if not refused:
        await core.set_weight_version_async(order.label)
    if refused in (0, len(results)):
        await core.resume_scheduler_async()
    return {"results": results, "pause_s": time.perf_counter() - started}
