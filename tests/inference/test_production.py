"""Rollouts made inside the replica, against the real environment service over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import pytest
import torch
import uvicorn

from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.generation import Sampling
from deltawire.protocol.rollouts import RolloutGroup, Task, Ticket
from deltawire.service.serve import bind
from deltawire.streams.open import open_trainer_streams
from deltawire_environment.app import Environment, create_app
from deltawire_environment.settings import EnvironmentSettings

if TYPE_CHECKING:
    from tests.inference.conftest import MakeRun, Serving

Serve = Callable[..., AbstractAsyncContextManager["Serving"]]


@pytest.fixture
async def environment_url() -> AsyncIterator[str]:
    """The guessing game behind a real port."""
    listener = bind("127.0.0.1", 0)
    app = create_app(Environment(EnvironmentSettings(), None))
    config = uvicorn.Config(app, log_config=None, ws="websockets-sansio")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving


def ticket(number: int, **fields: object) -> Ticket:
    """An order for a small group."""
    return Ticket.model_validate(
        {
            "ticket_id": f"t{number}",
            "run_id": "tiny",
            "task": Task(seed=number),
            "group_size": 4,
            "sampling": Sampling(max_new_tokens=6),
            "max_turns": 2,
            "max_tokens": 480,
            **fields,
        }
    )


async def test_tickets_become_groups_whose_logprobs_are_those_of_the_policy(
    make_run: "MakeRun", serve: Serve, environment_url: str
) -> None:
    run = make_run(dtype=torch.float32)
    streams = open_trainer_streams("memory://production", run_id=run.run_id)
    async with serve(run, streams="memory://production", environment_url=environment_url):
        await streams.issue([ticket(number) for number in range(3)])
        groups: list[RolloutGroup] = []
        while len(groups) < 3:
            groups += [d.group for d in await streams.read(limit=8, timeout_s=5.0)]
        await streams.issue([ticket(9, min_version=1)])  # born fresh: it waits for the weights
        first = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        run.publish()
        fresh = await streams.read(limit=8, timeout_s=20.0)
        (registered,) = await streams.replicas()

        run.model.load_state_dict(first)
        assert sorted(group.group_id for group in groups) == ["t0", "t1", "t2"]
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert rollout.status in ("ok", "truncated"), rollout.reason
            assert rollout.replica_id == "replica-1"
            (sequence,) = rollout.sequences
            assert {span.version for span in sequence.spans} == {0}
            sampled = torch.tensor(sequence.loss_mask).bool()[1:]
            found = torch.tensor(sequence.logprobs)[1:][sampled]
            expected = run.logprobs(sequence.token_ids)[sampled]
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        assert {r.oldest_version for d in fresh for r in d.group.rollouts} == {1}
        assert registered.replica_id == "replica-1" and registered.run_id == "tiny"
        assert isinstance(registered, ReplicaStatus)


async def test_rollouts_are_made_on_demand(
    make_run: "MakeRun", serve: Serve, environment_url: str
) -> None:
    async with (
        serve(make_run(), environment_url=environment_url) as serving,
        serving.http_client() as client,
    ):
        answer = await client.post(
            "/rollouts",
            json={"task": {"seed": 5}, "group_size": 3, "sampling": {"max_new_tokens": 5}},
        )

        group = RolloutGroup.model_validate_json(answer.content)
        assert len(group.rollouts) == 3 and group.task.seed == 5
        assert all(rollout.status in ("ok", "truncated") for rollout in group.rollouts)


async def test_rollouts_without_an_environment_say_what_is_missing(
    make_run: "MakeRun", serve: Serve
) -> None:
    async with serve(make_run()) as serving, serving.http_client() as client:
        answer = await client.post("/rollouts", json={})

        assert answer.status_code == 502 and "ENVIRONMENT_URL" in answer.json()["detail"]


async def test_draining_gives_unfinished_tickets_back(
    make_run: "MakeRun", serve: Serve, environment_url: str
) -> None:
    run = make_run()
    streams = open_trainer_streams("memory://draining", run_id=run.run_id)
    async with serve(
        run, streams="memory://draining", environment_url=environment_url, drain_s=0.1
    ) as serving:
        long = Sampling(max_new_tokens=400, ignore_eos=True)
        await streams.issue([ticket(1, sampling=long, group_size=8)])
        while not serving.engine.load().running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await serving.engine.pause()  # however fast the machine, the group does not finish

        await serving.service.drain()

        lease = await streams.claim("another", timeout_s=1.0)
        assert lease is not None and lease.ticket.ticket_id == "t1"


async def test_streams_without_an_environment_are_named_and_the_replica_serves_on(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run()
    async with serve(run, streams="memory://alone") as serving, serving.http_client() as client:
        run.publish()
        await serving.serves(1)

        status = ReplicaStatus.model_validate_json((await client.get("/status")).content)
        assert "INFERENCE_ENVIRONMENT_URL" in status.last_error
        assert (await client.post("/v1/generate", json={"prompt_ids": [1]})).status_code == 200
