"""Sessions in environments: ours, foreign ones, sleeping, full, cut and hanging ones."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import HTMLResponse, JSONResponse, Response

from deltawire.protocol.errors import CapacityReached, EnvironmentFault, EpisodeFailed
from deltawire.protocol.rollouts import Task
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.environment import EnvironmentClient
from deltawire.rollout.observation import parse_observation
from deltawire_environment.app import Environment, create_app
from deltawire_environment.settings import EnvironmentSettings

SOON = 60.0


async def test_an_episode_is_reset_and_steps(serve_openenv):
    server = await serve_openenv(turns=2)
    task = Task(seed=3, split="eval", index=4, row={"level": "hard"})
    session, first = await EnvironmentClient(server.url).start(task, deadline=Deadline.after(SOON))
    async with session:
        second = await session.step("crane", deadline=Deadline.after(SOON))
        third = await session.step("slate", deadline=Deadline.after(SOON))

    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert (second.reward, second.done, third.done) == (0.5, False, True)
    [reset] = server.resets
    assert (reset["seed"], reset["split"], reset["index"], reset["level"]) == (3, "eval", 4, "hard")
    assert server.said == ["crane", "slate"]


async def test_a_server_behind_a_proxy_that_spoils_its_answer_is_asked_again(serve_openenv):
    server = await serve_openenv()
    spoiled = [Response(b"not packed", headers={"Content-Encoding": "gzip"})]

    @server.app.get("/schema")
    async def schema() -> Response:
        return spoiled.pop() if spoiled else JSONResponse({})

    client = EnvironmentClient(server.url)
    session, _ = await client.start(Task(seed=1), deadline=Deadline.after(SOON))
    await session.close()
    assert not spoiled


async def test_sessions_go_to_the_emptiest_server(serve_openenv):
    servers = [await serve_openenv() for _ in range(3)]
    client = EnvironmentClient([server.url for server in servers])
    started = await asyncio.gather(
        *(client.start(Task(seed=n), deadline=Deadline.after(SOON)) for n in range(9))
    )
    assert [server.most_active for server in servers] == [3, 3, 3]
    for session, _ in started:
        await session.close()


async def test_a_full_server_is_left_for_another(serve_openenv):
    small, large = await serve_openenv(max_sessions=1), await serve_openenv()
    client = EnvironmentClient([small.url, large.url])
    started = [await client.start(Task(), deadline=Deadline.after(SOON)) for _ in range(6)]
    assert (small.most_active, large.most_active) == (1, 5)
    for session, _ in started:
        await session.close()


async def test_full_servers_are_reported_to_who_cannot_wait(serve_openenv):
    server = await serve_openenv(max_sessions=1)
    client = EnvironmentClient(server.url)
    session, _ = await client.start(Task(), deadline=Deadline.after(SOON))
    with pytest.raises(CapacityReached):
        await client.start(Task(), deadline=Deadline.after(SOON), wait_for_room=False)
    await session.close()


async def test_room_is_waited_for(serve_openenv):
    server = await serve_openenv(max_sessions=1)
    client = EnvironmentClient(server.url)
    session, _ = await client.start(Task(), deadline=Deadline.after(SOON))
    waiting = asyncio.create_task(client.start(Task(), deadline=Deadline.after(SOON)))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await session.close()
    second, _ = await waiting
    await second.close()


async def test_a_waking_server_is_waited_for(serve_openenv):
    server = await serve_openenv()
    answers = [
        HTMLResponse("<html>Building</html>", 503),
        HTMLResponse("<html>Starting</html>", 200),
        JSONResponse({"action": {"properties": {"message": {}}, "required": ["message"]}}),
    ]

    @server.app.get("/schema")
    async def schema() -> Response:
        return answers.pop(0)

    client = EnvironmentClient(server.url)
    session, _ = await client.start(Task(), deadline=Deadline.after(SOON))
    assert answers == [], "a page for people is no answer"
    await session.close()


async def test_nobody_there_is_waited_for_until_the_deadline():
    client = EnvironmentClient("http://127.0.0.1:9")
    with pytest.raises(TimeoutError):
        await client.start(Task(), deadline=Deadline.after(0.3))


async def test_a_refused_token_is_not_retried(serve_app):
    app = FastAPI()
    async with serve_app(app) as url:
        # No /ws route: the handshake is refused with 403, as our services refuse a wrong token.
        with pytest.raises(EnvironmentFault, match="token"):
            await EnvironmentClient(url).start(Task(), deadline=Deadline.after(SOON))


async def test_a_late_answer_is_never_taken_for_the_next_one(serve_openenv):
    server = await serve_openenv()
    server.hang_on = "slow"
    client = EnvironmentClient(server.url, answer_timeout_s=0.1)
    session, _ = await client.start(Task(), deadline=Deadline.after(SOON))
    with pytest.raises(EpisodeFailed, match="no answer"):
        await session.step("slow", deadline=Deadline.after(SOON))
    assert session._socket is None
    await session.close()


async def test_a_cut_foreign_session_fails_the_episode(serve_openenv):
    server = await serve_openenv()
    server.cut_on = "boom"
    session, _ = await EnvironmentClient(server.url).start(Task(), deadline=Deadline.after(SOON))
    with pytest.raises(EpisodeFailed, match="cut the connection"):
        await session.step("boom", deadline=Deadline.after(SOON))
    await session.close()


# -- peers that are really others -----------------------------------------------------------------


async def test_a_real_openenv_server_plays_with_us(serve_app):
    openenv = pytest.importorskip("openenv.core.env_server")

    class Say(openenv.Action):
        guess: str

    class Heard(openenv.Observation):
        text: str = ""

    class Echo(openenv.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            self._said = []
            return Heard(text=f"seed {seed}")

        def step(self, action, timeout_s=None, **_):
            self._said.append(action.guess)
            done = len(self._said) == 2
            return Heard(text=" ".join(self._said), reward=float(len(self._said)), done=done)

        @property
        def state(self):
            return openenv.State()

    app = openenv.create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=2)
    async with serve_app(app) as url:
        client = EnvironmentClient(url)
        session, first = await client.start(Task(seed=5), deadline=Deadline.after(SOON))
        async with session:
            assert first.messages == [{"role": "user", "content": "seed 5"}]
            second = await session.step("a", deadline=Deadline.after(SOON))
            third = await session.step("b", deadline=Deadline.after(SOON))
            other, _ = await client.start(Task(), deadline=Deadline.after(SOON))
            with pytest.raises(CapacityReached):
                await client.start(Task(), deadline=Deadline.after(SOON), wait_for_room=False)
            await other.close()
    assert (second.messages[0]["content"], second.reward, second.done) == ("a", 1.0, False)
    assert (third.messages[0]["content"], third.reward, third.done) == ("a b", 2.0, True)


class CuttingProxy:
    """TCP in front of a server; swallows answers and cuts connections when told to."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self.connections = 0
        self._port = port
        self._swallow = False
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Every connection there is."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def swallow_next_answer(self) -> None:
        """It never arrives, and the connection with it is cut."""
        self._swallow = True

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["CuttingProxy"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self
            self.cut()

    async def _accept(self, reader, writer) -> None:
        self.connections += 1
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, behind_writer]
        await asyncio.gather(
            self._pump(reader, behind_writer, answers=False),
            self._pump(behind_reader, writer, answers=True),
        )

    async def _pump(self, reader, writer, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if answers and self._swallow:
                    self._swallow = False
                    self.cut()
                    return
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def our_service(serve_app, monkeypatch) -> AsyncIterator[tuple[Environment, CuttingProxy]]:
    """The real environment service, behind a network that can be cut."""
    monkeypatch.delenv("ENVIRONMENT_JOB", raising=False)
    environment = Environment(EnvironmentSettings(worlds=["guess"]), None)
    async with (
        serve_app(create_app(environment)) as url,
        CuttingProxy(int(url.rpartition(":")[2])).serving() as proxy,
    ):
        yield environment, proxy


async def test_our_service_plays_the_same_game_for_the_same_task(our_service):
    _, proxy = our_service
    client = EnvironmentClient(proxy.url)
    games = [await client.start(Task(seed=3), deadline=Deadline.after(SOON)) for _ in range(2)]
    heard = [await s.step("[crane]", deadline=Deadline.after(SOON)) for s, _ in games]
    assert games[0][1].messages == games[1][1].messages != []
    assert heard[0] == heard[1]
    for session, _ in games:
        await session.close()


async def test_a_cut_session_of_our_service_goes_on(our_service):
    environment, proxy = our_service
    session, _ = await EnvironmentClient(proxy.url).start(Task(), deadline=Deadline.after(SOON))
    await session.step("[crane]", deadline=Deadline.after(SOON))
    proxy.cut()
    again = await session.step("[crane]", deadline=Deadline.after(SOON))
    assert again.info["words"] == ["crane"], "the game remembers the guess before the cut"
    assert environment.episodes.steps_total == 2
    await session.close()


async def test_a_step_whose_answer_was_lost_is_not_taken_twice(our_service):
    environment, proxy = our_service
    session, _ = await EnvironmentClient(proxy.url).start(Task(), deadline=Deadline.after(SOON))
    proxy.swallow_next_answer()
    heard = await session.step("[crane]", deadline=Deadline.after(SOON))
    assert heard.info["words"] == ["crane"]
    assert environment.episodes.steps_total == 1
    await session.close()


async def test_a_session_whose_server_forgot_it_fails_the_episode(our_service):
    environment, proxy = our_service
    session, _ = await EnvironmentClient(proxy.url).start(Task(), deadline=Deadline.after(SOON))
    environment.sessions.close_all()
    proxy.cut()
    with pytest.raises(EpisodeFailed):
        await session.step("[crane]", deadline=Deadline.after(SOON))
    await session.close()


# -- what an observation may look like ------------------------------------------------------------


@pytest.mark.parametrize(
    ("observation", "messages"),
    [
        ({"chat": [{"role": "assistant", "content": "x"}]}, [("assistant", "x")]),
        ({"messages": [{"sender_id": 1, "content": "x"}], "prompt": "p"}, [("user", "x")]),
        ({"prompt": "p"}, [("user", "p")]),
        ({"text": ""}, []),
        ({"board": [1, 2]}, [("user", '{"board": [1, 2]}')]),
    ],
)
def test_messages_are_found_in_any_observation(observation, messages):
    seen = parse_observation({"observation": observation})
    assert [(m["role"], m["content"]) for m in seen.messages] == messages


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"observation": 3},
        {"observation": {}, "reward": float("nan")},
        {"observation": {"chat": [3]}},
        {"observation": {"text": "x", "span_rewards": [[1]]}},
        {"observation": {"text": "x", "span_rewards": [[0, 1, float("inf")]]}},
        {"observation": {"text": "x", "agent_rewards": {"a": float("nan")}}},
        {"observation": {"text": "x", "reward_parts": {"p": float("-inf")}}},
        {"observation": {"text": "x", "metrics": {"m": 10**400}}},
    ],
)
def test_an_observation_without_sense_fails_the_episode(data):
    with pytest.raises(EpisodeFailed):
        parse_observation(data)


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "observation", "data": ["text"]},
        {"type": "error", "data": "it broke"},
        {"type": "observation", "data": None},
    ],
)
async def test_a_frame_of_another_shape_fails_the_episode(serve_app, frame):
    app = FastAPI()

    @app.get("/schema")
    async def schema() -> dict[str, object]:
        return {"action": {"properties": None, "required": None}}

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        await socket.accept()
        await socket.receive_json()
        await socket.send_json(frame)

    async with serve_app(app) as url:
        with pytest.raises(EpisodeFailed, match="OpenEnv protocol"):
            await EnvironmentClient(url).start(Task(), deadline=Deadline.after(20.0))
