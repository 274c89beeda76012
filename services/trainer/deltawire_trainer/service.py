"""The composition root: settings become a store, streams, a run and an app. The one place that
knows concrete classes."""

import asyncio
import json
import logging
import sys
from pathlib import Path

from pydantic import ValidationError

from deltawire.control.client import ServiceClient
from deltawire.job.spec import JobSpec
from deltawire.protocol.errors import DeltawireError, RemoteError, SettingsError
from deltawire.service.metrics import Metrics
from deltawire.service.serve import announce_port, bind, serve
from deltawire.store.base import Store
from deltawire.store.open import open_store
from deltawire.streams.base import TrainerStreams
from deltawire.streams.open import open_trainer_streams
from deltawire_trainer.app import create_app
from deltawire_trainer.checkpointing import Checkpointing
from deltawire_trainer.evaluation import Evaluation
from deltawire_trainer.events import EventHub
from deltawire_trainer.feeder import Feeder
from deltawire_trainer.guard import Guard
from deltawire_trainer.intake import Intake, Rules
from deltawire_trainer.loop import TrainingLoop
from deltawire_trainer.opening import OpenRun, open_run
from deltawire_trainer.publishing import Publishing
from deltawire_trainer.rollout_log import RolloutLog
from deltawire_trainer.settings import TrainerSettings
from deltawire_trainer.tickets import TicketBook
from deltawire_trainer.trainer import Trainer

log = logging.getLogger(__name__)

_JOB_ROUTE = "/job"
_JOB_WAIT_S = 120.0
"""How long an environment service may take to come up and give the job."""
_END_S = 3.0
"""Longest wait for a task to end: whoever sent SIGTERM will not wait much longer."""
_EVAL_HOLD_S = 60.0
"""Longest a version is held back for an evaluation of the one before."""


async def run_trainer(settings: TrainerSettings) -> int:
    """Serve, train, and go on serving the outcome until told to stop."""
    job = await find_job(settings)
    store = open_store(settings.store)
    streams = open_trainer_streams(settings.streams, run_id=settings.run_id)
    events = EventHub()
    trainer = Trainer(
        run_id=settings.run_id,
        job=job,
        model=settings.model or job.model.source,
        store=store,
        events=events,
        rollouts=RolloutLog(settings.run_dir / "rollouts" if settings.keep_rollouts else None),
    )
    metrics = Metrics("trainer")
    app = create_app(trainer, streams=streams, metrics=metrics, token=settings.token)
    listener = bind(settings.host, settings.port)
    if settings.port_file is not None:
        announce_port(listener, settings.port_file)
    serving = asyncio.create_task(serve(app, listener))
    training = asyncio.create_task(train(trainer, settings, store, streams, metrics))
    try:
        await asyncio.wait({serving, training}, return_when=asyncio.FIRST_COMPLETED)
        failed = training.done() and training.result() != 0
        if not failed and not settings.exit_when_done:
            await serving
    finally:
        await _end(training)
        await _end(serving)
        await streams.close()
        store.close()
    code = training.result() if training.done() and not training.cancelled() else 0
    if code:
        sys.stderr.write(f"{trainer.failure}\n")  # last, where a person looks first
    return code


async def train(
    trainer: Trainer,
    settings: TrainerSettings,
    store: Store,
    streams: TrainerStreams,
    metrics: Metrics,
) -> int:
    """Open the run and train it: 0, or 2 for an error of the tree, or 1 for anything else.

    The border where a failed run becomes a status and an exit code: what supervises the process
    starts it again after a 1, and tells a person after a 2.
    """
    run: OpenRun | None = None
    try:
        run = await asyncio.to_thread(open_run, settings, trainer.job, store)
        await trainer.run(build_loop(run, trainer, settings, streams, metrics))
    except DeltawireError as error:
        log.error("run failed", extra={"error": type(error).__name__, "detail": str(error)})
        trainer.fail(f"{type(error).__name__}: {error}")
        return 2
    except Exception as error:
        log.exception("run failed")
        trainer.fail(f"unexpected {type(error).__name__}: {error}")
        return 1
    else:
        return 0
    finally:
        if run is not None:
            await asyncio.to_thread(run.close)


def build_loop(
    run: OpenRun,
    trainer: Trainer,
    settings: TrainerSettings,
    streams: TrainerStreams,
    metrics: Metrics,
) -> TrainingLoop:
    """Wire the parts of an open run together."""
    job, ledger, guard = run.job, run.recovered.ledger, Guard(enabled=run.job.train.guard)
    intake = Intake(
        streams,
        ledger,
        run.journal,
        Rules.of(job, vocabulary=run.policy.vocabulary),
        run_id=settings.run_id,
        trusts_redelivered=not run.took_over,
    )
    evaluation = Evaluation(hold_s=_EVAL_HOLD_S, past=run.recovered.evaluations)
    intake.on_eval = evaluation.receive
    book = TicketBook(
        job=job,
        run_id=settings.run_id,
        lineage=run.recovered.lineage,
        deadline_s=settings.ticket_deadline_s,
    )
    feeder = Feeder(
        streams=streams,
        intake=intake,
        ledger=ledger,
        journal=run.journal,
        book=book,
        guard=guard,
        job=job,
        first_ticket=run.recovered.tickets,
    )
    checkpointing = Checkpointing(
        run.checkpoints,
        run.learner,
        intake,
        run_id=settings.run_id,
        every=job.train.checkpoint_every,
    )
    return TrainingLoop(
        run,
        feeder=feeder,
        ledger=ledger,
        publishing=Publishing(run.publisher, streams, token=settings.token),
        checkpointing=checkpointing,
        evaluation=evaluation,
        guard=guard,
        events=trainer.events,
        rollouts=trainer.rollouts,
        metrics=metrics,
        threads=settings.threads,
        converge_timeout_s=settings.converge_timeout_s,
        last_eval_s=settings.last_eval_s,
    )


async def find_job(settings: TrainerSettings) -> JobSpec:
    """The job from a file, or from the environment service. Raises SettingsError, RemoteError."""
    if settings.job is not None:
        return read_job(settings.job)
    if not settings.environment_url:
        raise SettingsError("set TRAINER_JOB (a JSON file) or TRAINER_ENVIRONMENT_URL")
    give_up_at = asyncio.get_running_loop().time() + _JOB_WAIT_S
    async with ServiceClient(settings.environment_url, token=settings.token) as environment:
        while True:
            try:
                return await environment.get(_JOB_ROUTE, JobSpec)
            except RemoteError as error:
                if _is_final(error) or asyncio.get_running_loop().time() > give_up_at:
                    raise
                await asyncio.sleep(1.0)


def read_job(path: Path) -> JobSpec:
    """A resolved job from a JSON file. Raises SettingsError naming the field that is wrong."""
    try:
        return JobSpec.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise SettingsError(f"TRAINER_JOB={path}: {error.strerror}") from error
    except (json.JSONDecodeError, ValidationError) as error:
        raise SettingsError(f"TRAINER_JOB={path} is not a job: {error}") from error


def _is_final(error: RemoteError) -> bool:
    """A refusal, in contrast to a service that is still waking up."""
    return error.status in (401, 403, 404)


async def _end(task: asyncio.Task[None] | asyncio.Task[int]) -> None:
    """Stop a task and see it stopped; its error, if any, was dealt with where it arose."""
    task.cancel()
    await asyncio.wait({task}, timeout=_END_S)
