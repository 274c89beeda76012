"""Who takes part in a run under chaos, and through which links they reach each other.

    trainer ── trainer-redis ────┐
    replica-0 ─ replica-redis ───┤ Redis
    producer ─ producer-redis ───┘
    replica-0 ─ replica-environment ──┐
    producer ── producer-environment ─┴ environment
    producer ── producer-replica ── replica-1

replica-0 makes rollouts itself. replica-1 only serves; the producer (`deltawire worker`) uses both.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path

from deltawire.cli.children import Child
from deltawire.cli.plan import RunOptions, RunPlan, make_plan, service_children
from deltawire.job.load import load_job
from deltawire.job.resolve import resolve

from .faults import LINKS
from .processes import Party, RedisParty
from .wire import Wire
from .witness import Witness

RUN_ID = "chaos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """Everything of one run, not started yet but for Redis and the links."""

    plan: RunPlan
    redis: RedisParty
    wires: dict[str, Wire]
    all: dict[str, Party]
    """By name, without Redis."""

    @property
    def acknowledged(self) -> set[str]:
        """Groups that Redis was seen to answer for, on any link."""
        return {g for wire in self.wires.values() for g in wire.witness.acknowledged}


async def assemble(
    folder: Path, job_path: Path, overrides: list[str], *, lease_s: float, rng: random.Random
) -> Parties:
    """Plan the run as `deltawire run` does, and put a link between every two."""
    options = RunOptions(
        job_path=job_path,
        overrides=overrides,
        runs_dir=folder,
        replicas=2,
        engine="torch",
        store=None,
        streams=None,
        port=0,
    )
    plan = make_plan(options, resolve(load_job(job_path), overrides).spec, run_id=RUN_ID)
    redis = RedisParty(plan.folder / "redis")
    ports = {"redis": redis.server.port, "environment": plan.ports[1], "replica": plan.ports[3]}
    wires = {}
    for name in LINKS:
        to = name.partition("-")[2]
        wires[name] = Wire(
            name,
            lambda to=to: ports[to],  # type: ignore[misc]
            rng=rng,
            witness=Witness() if to == "redis" else None,
        )
        await wires[name].open()

    def streams(link: str) -> str:
        password = redis.server.password.get_secret_value()
        return f"redis://:{password}@127.0.0.1:{wires[link].port}/0?lease_s={lease_s:g}"

    environment, trainer, first, second = service_children(plan, streams="")
    parties = [
        _party("environment", environment),
        _party(
            "trainer",
            trainer,
            TRAINER_STREAMS=streams("trainer-redis"),
            TRAINER_TICKET_DEADLINE_S="60",
        ),
        _party(
            "replica-0",
            first,
            INFERENCE_STREAMS=streams("replica-redis"),
            INFERENCE_ENVIRONMENT_URL=_url(wires["replica-environment"]),
            INFERENCE_POLL_S="1",
        ),
        _party(
            "replica-1",
            second,
            INFERENCE_STREAMS="",
            INFERENCE_ENVIRONMENT_URL="",
            INFERENCE_POLL_S="1",
        ),
        _producer(
            plan,
            streams=streams("producer-redis"),
            environment=_url(wires["producer-environment"]),
            inference=f"{_url(wires['producer-replica'])},{plan.url(2)}",
        ),
    ]
    return Parties(plan=plan, redis=redis, wires=wires, all={p.name: p for p in parties})


def _party(name: str, child: Child, **values: str) -> Party:
    """A service as `deltawire run` would start it, with other addresses."""
    *_, module = child.command
    return Party(
        name=name,
        module=module,
        argv=[],
        environ={**child.environ, **values},
        log_path=child.log_path.with_name(f"{name}.log"),
        url=child.url,
        token=child.token,
    )


def _url(wire: Wire) -> str:
    return f"http://127.0.0.1:{wire.port}"


def _producer(plan: RunPlan, *, streams: str, environment: str, inference: str) -> Party:
    values = {
        "WORKER_STREAMS": streams,
        "WORKER_STORE": plan.store,
        "WORKER_RUN_ID": plan.run_id,
        "WORKER_INFERENCE": inference,
        "WORKER_ENVIRONMENT": environment,
        "WORKER_CACHE_DIR": str(plan.folder / "cache" / "producer"),
        "DELTAWIRE_TOKEN": plan.token.get_secret_value(),
        "OMP_NUM_THREADS": "1",
    }
    return Party(
        name="producer",
        module="deltawire.cli.main",
        argv=["worker"],
        environ={**os.environ, **values},
        log_path=plan.logs / "producer.log",
        url="",
        token=plan.token,
    )
