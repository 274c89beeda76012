"""One request for a whole swap: what follows from what the ranks say."""

import pytest

from deltawire_inference.vllm_plugin.swap_route import SwapOrder, swap_weights

ORDER = SwapOrder(key="k", label="8", mode="keep", clear_cache=True)
TOOK = {"rank": 0, "seconds": 0.01, "elements": 5}
REFUSED = {"rank": 1, "refused": "not staged"}


class Core:
    """vLLM's engine core client, as far as a swap goes; notes what is asked of it."""

    def __init__(self, *results: dict[str, object]) -> None:
        self.results = list(results)
        self.asked: list[str] = []

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(f"pause {mode} {clear_cache}")

    async def collective_rpc_async(
        self, method: str, timeout: float | None = None, args: tuple[object, ...] = ()
    ) -> list[dict[str, object]]:
        self.asked.append(f"{method} {args[0]}")
        return self.results

    async def set_weight_version_async(self, label: str) -> None:
        self.asked.append(f"label {label}")

    async def resume_scheduler_async(self) -> None:
        self.asked.append("resume")


BEFORE = ["pause keep True", "deltawire_apply k"]


@pytest.mark.parametrize(
    ("results", "after"),
    [
        ((TOOK, TOOK), ["label 8", "resume"]),
        ((REFUSED, REFUSED), ["resume"]),  # nothing was written: the old version goes on
        ((TOOK, REFUSED), []),  # no version at all: it stays paused, and the service ends it
    ],
)
async def test_generation_goes_on_unless_ranks_disagree(
    results: tuple[dict[str, object], ...], after: list[str]
) -> None:
    core = Core(*results)
    answer = await swap_weights(core, ORDER)
    assert core.asked == [*BEFORE, *after]
    assert answer["results"] == list(results)
    assert answer["pause_s"] >= 0


async def test_a_rank_that_fails_leaves_generation_paused() -> None:
    core = Core()

    async def fail(*args: object, **kwargs: object) -> list[dict[str, object]]:
        raise RuntimeError("worker died")

    core.collective_rpc_async = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await swap_weights(core, ORDER)
    assert core.asked == BEFORE[:1]
