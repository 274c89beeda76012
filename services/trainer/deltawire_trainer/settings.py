"""What the trainer can be told through the environment."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from deltawire.service.settings import Port, ServiceSettings


class TrainerSettings(ServiceSettings):
    """`TRAINER_*` variables."""

    model_config = SettingsConfigDict(
        env_prefix="TRAINER_", frozen=True, extra="ignore", env_ignore_empty=True
    )

    port: Port = 7860
    """Port to bind; 0 takes a free one."""
    port_file: Path | None = None
    """Where to write the address that was bound, as JSON."""
    job: Path | None = None
    """A resolved job as JSON. Without it the job is asked for at `environment_url`."""
    environment_url: str = ""
    """Of the environment service, whose GET /job gives the job."""
    store: str = "file://./runs/bucket"
    """The bucket: file:///path, hf://buckets/owner/name/prefix or s3://bucket/prefix."""
    streams: str = "redis://127.0.0.1:6379/0"
    """Tickets and rollouts: redis://, rediss:// or memory://name."""
    run_dir: Path = Path("runs/default")
    """Journal, checkpoints, rollouts and the owner file of this trainer."""
    model: str = ""
    """Overrides the job's base model: a folder, a Hub id, or the offline package's model."""
    cache_dir: Path | None = None
    """Where an unpacked offline model is kept; ~/.cache/deltawire unless told."""
    threads: int = Field(1, ge=1)
    """CPU threads of torch."""
    device: str = "cpu"
    """Where the model is trained: cpu, cuda, cuda:1, ..."""
    take_over: bool = False
    """Go on with a run of another trainer: its weights come from the bucket."""
    exit_when_done: bool = False
    """End the process when the run is finished instead of serving its status."""
    ticket_deadline_s: float = Field(600.0, gt=0)
    """Seconds from the claim of a ticket until its group must be finished."""
    converge_timeout_s: float = Field(30.0, ge=0)
    """Seconds to wait at the end for the registered replicas to reach the last version."""
    last_eval_s: float = Field(120.0, ge=0)
    """Seconds from the order of the last version's evaluation until the run ends without it."""
    keep_rollouts: bool = True
    """Write the rollouts of every step under `run_dir`."""
