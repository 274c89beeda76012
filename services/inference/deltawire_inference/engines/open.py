"""The engine that the settings name. Its libraries are imported only when it is chosen."""

from deltawire_inference.engines.base import Engine
from deltawire_inference.settings import InferenceSettings


def open_engine(settings: InferenceSettings) -> Engine:
    """An engine that has not started. SettingsError when its library is not installed."""
    if settings.engine == "vllm":
        from deltawire_inference.engines.vllm.open import open_vllm

        return open_vllm(settings)
    import torch

    from deltawire_inference.engines.torch.core import Limits
    from deltawire_inference.engines.torch.engine import TorchEngine

    if settings.threads:
        torch.set_num_threads(settings.threads)
    limits = Limits(
        max_rows=settings.max_rows,
        max_step_tokens=settings.max_step_tokens,
        max_length=settings.max_length,
        prefix_bytes=settings.prefix_bytes,
    )
    return TorchEngine(limits=limits, device=settings.device)
