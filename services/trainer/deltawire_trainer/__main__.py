"""`python -m deltawire_trainer`: settings first, then the heavy imports, then the run."""

import sys

from deltawire.service.logging import configure_logging
from deltawire.service.serve import run_service
from deltawire.service.settings import load_settings
from deltawire_trainer.settings import TrainerSettings


async def run(argv: list[str]) -> int:
    """Serve the trainer until told to stop."""
    settings = load_settings(TrainerSettings, argv)
    configure_logging(service="trainer", level=settings.log_level, style=settings.log_format)
    import torch

    from deltawire_trainer.service import run_trainer

    torch.set_num_threads(settings.threads)
    return await run_trainer(settings)


if __name__ == "__main__":
    sys.exit(run_service(run(sys.argv)))
