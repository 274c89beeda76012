"""deltawire inside vLLM: sparse weight updates, scattered in place between two steps.

`vllm.general_plugins` calls `register` in the API server, the engine core and every worker. It
adds the weight transfer backend `deltawire`:

    vllm serve MODEL --weight-transfer-config '{"backend": "deltawire"}'

Nothing heavier than the standard library is imported until vLLM asks for the engine.
"""

import os
from importlib.metadata import version

BACKEND = "deltawire"
OLDEST_VLLM = (0, 29)
"""From here on an engine owns its whole update session; before, the seam differs by release."""
PLAIN_LINEAR_VARIABLE = "DELTAWIRE_PLAIN_LINEAR"
"""Set to 0, CPU workers pack their linear weights as stock vLLM does; no update can enter them."""


def register() -> None:
    """Add the backend to vLLM's factory; on a CPU worker also keep linear weights patchable.

    May be called many times in one process.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        supported = parse_release(version("vllm")) >= OLDEST_VLLM
        module, name = ("engine", "DeltawireEngine") if supported else ("refusal", "TooOld")
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.{module}", name)
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and os.environ.get(PLAIN_LINEAR_VARIABLE, "1") != "0":
        from deltawire_inference.vllm_plugin.plain_linear import (
            ask_for_amx,
            keep_linear_weights_plain,
        )

        keep_linear_weights_plain()
        ask_for_amx()


def parse_release(text: str) -> tuple[int, int]:
    """`0.32.0+cpu` -> (0, 32). A development build without numbers counts as new."""
    numbers = text.split("+")[0].split(".")
    if len(numbers) < 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
        return OLDEST_VLLM
    return int(numbers[0]), int(numbers[1])
