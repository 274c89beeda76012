"""Our client on an environment that was built with the real OpenEnv package."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from deltawire.protocol.errors import CapacityReached, EpisodeFailed
from deltawire.protocol.rollouts import Task
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.environment import EnvironmentClient
from deltawire.service.serve import bind

env_server = pytest.importorskip("openenv.core.env_server")


class GuessAction(env_server.Action):
    message: str


class GuessObservation(env_server.Observation):
    text: str = ""
    secret_is_above: bool | None = None


class HotOrCold(env_server.Environment):
    """Five tries to find a number drawn from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = env_server.State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any):
        self._secret = (seed or 0) % 10
        self._state = env_server.State(episode_id=episode_id, step_count=0)
        return GuessObservation(text="A number from 0 to 9?")

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any):
        if action.message == "break":
            raise RuntimeError("a fault of the world")
        self._state.step_count += 1
        guess = int(action.message)
        right = guess == self._secret
        return GuessObservation(
            text="Right." if right else "Wrong.",
            reward=float(right),
            done=right or self._state.step_count >= 5,
            secret_is_above=self._secret > guess,
        )

    @property
    def state(self):
        return self._state


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = env_server.create_app(
        HotOrCold, GuessAction, GuessObservation, env_name="hot_or_cold", max_concurrent_envs=2
    )
    config = uvicorn.Config(app, log_config=None, ws="websockets-sansio")
    server, listener = uvicorn.Server(config), bind("127.0.0.1", 0)
    task = asyncio.create_task(server._serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await task
    listener.close()


async def test_an_episode_is_played_with_the_single_required_field(url: str) -> None:
    client, deadline = EnvironmentClient(url), Deadline.after(30)
    session, first = await client.start(Task(seed=7, row={"unknown": 1}), deadline=deadline)
    async with session:
        assert first.messages == [{"role": "user", "content": "A number from 0 to 9?"}]
        wrong = await session.step("3", deadline=deadline)
        assert (wrong.done, wrong.reward) == (False, 0.0)
        right = await session.step("7", deadline=deadline)
        assert (right.done, right.reward) == (True, 1.0)


async def test_a_full_server_and_a_fault_of_the_world_are_told_apart(url: str) -> None:
    client, deadline = EnvironmentClient(url), Deadline.after(30)
    sessions = [(await client.start(Task(seed=n), deadline=deadline))[0] for n in range(2)]
    with pytest.raises(CapacityReached):
        await client.start(Task(), deadline=deadline, wait_for_room=False)
    with pytest.raises(EpisodeFailed, match="a fault of the world"):
        await sessions[0].step("break", deadline=deadline)
    assert not (await sessions[1].step("5", deadline=deadline)).done
    for session in sessions:
        await session.close()
