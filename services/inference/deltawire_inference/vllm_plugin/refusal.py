"""What vLLM gets instead of the engine when it is too old."""

from importlib.metadata import version
from typing import NoReturn


class TooOld:
    """Stands in the factory under our name and refuses with the reason."""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            "the deltawire weight transfer backend needs vLLM 0.29 or newer, found "
            f"{version('vllm')}; upgrade vLLM or serve with the torch engine"
        )
