"""`python -m deltawire_environment`: settings, job, app, serve."""

import sys

from deltawire.job.load import load_job
from deltawire.job.resolve import resolve
from deltawire.service.logging import configure_logging
from deltawire.service.serve import bind, run_service, serve
from deltawire.service.settings import load_settings
from deltawire_environment.app import Environment, create_app
from deltawire_environment.settings import EnvironmentSettings


async def run(argv: list[str]) -> int:
    """Load the user's job and serve its world until told to stop."""
    settings = load_settings(EnvironmentSettings, argv)
    configure_logging(service="environment", level=settings.log_level, style=settings.log_format)
    job = resolve(load_job(settings.job), settings.job_overrides) if settings.job else None
    environment = Environment(settings, job)
    await serve(
        create_app(environment),
        bind(settings.host, settings.port),
        drain=environment.drain,
        ws_max_size=settings.frame_bytes,
        ws_ping_interval=settings.ping_s or None,
        ws_ping_timeout=settings.ping_s or None,
        ws_per_message_deflate=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_service(run(sys.argv)))
