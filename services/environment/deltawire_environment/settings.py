"""Everything the environment service can be told, as ENVIRONMENT_* variables."""

from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from deltawire.service.settings import ServiceSettings


class EnvironmentSettings(ServiceSettings):
    """One class, built in __main__, passed down."""

    model_config = SettingsConfigDict(
        env_prefix="ENVIRONMENT_", frozen=True, extra="ignore", env_ignore_empty=True
    )

    job: Path | None = None
    """The user's job file. Its world is the default one; it runs in this service only."""
    job_overrides: list[str] = Field(default_factory=list)
    """JSON list of overrides, such as ["train.lr=2e-6"]."""
    worlds: list[str] = Field(default_factory=list)
    """JSON list of further built-in worlds to offer by name. Without a job the first is the
    default; ["guess"] when there is neither."""
    max_sessions: PositiveInt = 256
    """Sessions at a time; one more is told CAPACITY_REACHED."""
    idle_s: PositiveFloat = 900.0
    """A session without a live socket, or silent for `silent_s`, is closed after this long."""
    silent_s: PositiveFloat = 3600.0
    """A session whose socket answers pings but that sends nothing is closed after this long. Must
    exceed the longest generation of one turn."""
    grace_s: NonNegativeFloat = 60.0
    """How long a session whose socket was cut waits for its client to attach again."""
    ping_s: NonNegativeFloat = 20.0
    """Seconds between pings, and until a silent peer is gone. 0 for proxies that drop them."""
    frame_bytes: PositiveInt = 64 * 1024
    """Largest message a client may send."""
    body_bytes: PositiveInt = 1024 * 1024
    """Largest HTTP body."""
    drain_s: NonNegativeFloat = 2.0
    """After SIGTERM, how long running episodes may go on."""
    step_timeout_s: PositiveFloat = 60.0
    """Longest time a world may take for one reset or step."""
    pool_workers: PositiveInt = 16
    """Threads for worlds and rewards that block."""
