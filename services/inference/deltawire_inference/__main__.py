"""`python -m deltawire_inference`: settings, engine, app, serve."""

import sys

from deltawire.service.logging import configure_logging
from deltawire.service.serve import bind, run_service, serve
from deltawire.service.settings import load_settings
from deltawire_inference.settings import InferenceSettings


async def run(argv: list[str]) -> int:
    """Follow the run and serve until told to stop."""
    settings = load_settings(InferenceSettings, argv)
    configure_logging(service="inference", level=settings.log_level, style=settings.log_format)
    listener = bind(settings.host, settings.port)
    # Only now: a wrong setting or a taken port should not wait for torch.
    from deltawire_inference.app import Inference, build_app
    from deltawire_inference.engines.open import open_engine

    service = Inference(settings, open_engine(settings))
    await serve(build_app(service), listener, drain=service.drain)
    return 0


if __name__ == "__main__":
    sys.exit(run_service(run(sys.argv)))
