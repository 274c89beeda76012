"""From options to processes: ports, folders, secrets and the environment of each child."""

import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from deltawire.cli.children import Child
from deltawire.cli.local_vllm import vllm_environment
from deltawire.job.spec import JobSpec
from deltawire.job.suggestion import unknown
from deltawire.protocol.errors import DeltawireError, SettingsError
from deltawire.store.open import open_store
from deltawire.streams.local_server import free_port

TRAINER, ENVIRONMENT = "trainer", "environment"
ENGINES = ("torch", "vllm")
_STREAMS = ("redis", "rediss")
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line was told."""

    job_path: Path
    overrides: list[str]
    runs_dir: Path
    replicas: int
    engine: str
    store: str | None
    streams: str | None
    port: int
    """First of the consecutive ports; 0 takes free ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run on this machine, ready to be started."""

    run_id: str
    folder: Path
    spec: JobSpec
    options: RunOptions
    ports: list[int]
    """trainer, environment, then the replicas."""
    store: str
    token: SecretStr
    threads: int
    """CPU threads of each process that computes."""
    engine_environ: Mapping[str, str] = field(default_factory=dict)
    """What replicas need to find and start their engine."""

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.folder / "logs"

    def url(self, index: int) -> str:
        """Where the service with that port listens."""
        return f"http://127.0.0.1:{self.ports[index]}"


def make_plan(options: RunOptions, spec: JobSpec, *, run_id: str) -> RunPlan:
    """Choose ports and folders. Raises SettingsError for what cannot be started, a port in use or a
    folder that fails; only then is there a folder."""
    engine_environ = check_options(options)
    ports = list(_ports(options.port, 2 + options.replicas))
    folder = options.runs_dir.absolute() / run_id
    try:
        for name in ("logs", "bucket", "redis", "cache"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot make the run folder {folder}: {error.strerror}") from error
    return RunPlan(
        run_id=run_id,
        folder=folder,
        spec=spec,
        options=options,
        ports=ports,
        store=options.store or f"file://{folder / 'bucket'}",
        token=SecretStr(secrets.token_urlsafe(24)),
        threads=max(1, _cores() // (1 + options.replicas)),
        engine_environ=engine_environ,
    )


def check_options(options: RunOptions) -> dict[str, str]:
    """What replicas need to find their engine. Raises SettingsError naming the option that no
    service could be started with."""
    if options.engine not in ENGINES:
        raise SettingsError(unknown("--engine", options.engine, ENGINES))
    if options.store is not None:
        try:
            open_store(options.store).close()
        except DeltawireError as error:
            raise SettingsError(f"--store: {error}") from error
    if options.streams is not None:
        scheme = urlsplit(options.streams).scheme.partition("+")[0]
        if scheme not in _STREAMS:
            raise SettingsError(
                f"--streams: expected redis://… or rediss://…, found scheme {scheme!r}; without "
                "the option a Redis is started"
            )
    return vllm_environment(Path.cwd(), os.environ) if options.engine == "vllm" else {}


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ports(first: int, count: int) -> Iterator[int]:
    if not 0 <= first <= _LAST_PORT + 1 - count:
        raise SettingsError(
            f"--port: {count} consecutive ports from {first} on do not lie in 1 to {_LAST_PORT}; "
            "0 takes free ones"
        )
    if not first:
        found: set[int] = set()
        while len(found) < count:
            found.add(free_port())
        yield from found
        return
    for wanted in range(first, first + count):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError as error:
                raise SettingsError(
                    f"port {wanted} is in use; stop what uses it or choose others with --port"
                ) from error
            yield wanted


def service_children(plan: RunPlan, *, streams: str) -> list[Child]:
    """The three services as children: environment, trainer, then the replicas."""
    job_file = plan.folder / "job.json"
    job_file.write_text(plan.spec.model_dump_json(indent=1) + "\n")
    replicas = [_replica(plan, index, streams) for index in range(plan.options.replicas)]
    return [_environment(plan), _trainer(plan, job_file, streams), *replicas]


def _environment(plan: RunPlan) -> Child:
    return _child(
        plan,
        ENVIRONMENT,
        1,
        module="deltawire_environment",
        prefix="ENVIRONMENT",
        values={
            "JOB": str(plan.options.job_path.absolute()),
            "JOB_OVERRIDES": json.dumps(plan.options.overrides),
            "MAX_SESSIONS": str(plan.spec.env.sessions),
        },
    )


def _trainer(plan: RunPlan, job_file: Path, streams: str) -> Child:
    return _child(
        plan,
        TRAINER,
        0,
        module="deltawire_trainer",
        prefix="TRAINER",
        values={
            "JOB": str(job_file),
            "STORE": plan.store,
            "STREAMS": streams,
            "RUN_DIR": str(plan.folder),
            "THREADS": str(plan.threads),
        },
    )


def _replica(plan: RunPlan, index: int, streams: str) -> Child:
    name = f"inference-{index}"
    return _child(
        plan,
        name,
        2 + index,
        module="deltawire_inference",
        prefix="INFERENCE",
        values={
            "REPLICA_ID": name,
            "ENGINE": plan.options.engine,
            "STORE": plan.store,
            "STREAMS": streams,
            "ENVIRONMENT_URL": plan.url(1),
            "PUBLIC_URL": plan.url(2 + index),
            "CACHE_DIR": str(plan.folder / "cache" / name),
            "THREADS": str(plan.threads),
            "DRAIN_S": "1",
        },
        engine_environ=plan.engine_environ,
    )


def _child(
    plan: RunPlan,
    name: str,
    index: int,
    *,
    module: str,
    prefix: str,
    values: dict[str, str],
    engine_environ: Mapping[str, str] | None = None,
) -> Child:
    common = {
        "HOST": "127.0.0.1",
        "PORT": str(plan.ports[index]),
        "TOKEN": plan.token.get_secret_value(),
        "RUN_ID": plan.run_id,
        "LOG_FORMAT": "text",
    }
    ours = {f"{prefix}_{key}": value for key, value in {**common, **values}.items()}
    threads = {"OMP_NUM_THREADS": str(plan.threads), "TOKENIZERS_PARALLELISM": "false"}
    return Child(
        name=name,
        command=[sys.executable, "-m", module],
        environ={**os.environ, **(engine_environ or {}), **threads, **ours},
        log_path=plan.logs / f"{name}.log",
        url=plan.url(index),
        token=plan.token,
    )
