"""The WebSocket protocol at its edges: bad frames, retries, cut sockets, limits."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from deltawire.job import Env, Job, Reply
from deltawire.job.resolve import resolve
from deltawire.protocol.rollouts import Task
from deltawire_environment.app import Environment
from deltawire_environment.pool import Pool
from deltawire_environment.sessions import SessionGone
from deltawire_environment.settings import EnvironmentSettings
from deltawire_environment.ws import SESSION_HEADER


async def ask(socket: ClientConnection, **frame: object) -> dict:
    await socket.send(json.dumps(frame))
    return json.loads(await asyncio.wait_for(socket.recv(), 20))


@contextlib.asynccontextmanager
async def socket_to(running, query: str = "", **options: object) -> AsyncIterator[ClientConnection]:
    async with connect(running.ws_url + query, proxy=None, **options) as socket:
        yield socket


async def cut(socket: ClientConnection) -> str:
    """Break the connection without a word; the session's id."""
    session_id = socket.response.headers[SESSION_HEADER]
    socket.transport.abort()
    await socket.wait_closed()
    return session_id


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("not json", "INVALID_JSON"),
        ("[1, 2]", "UNKNOWN_TYPE"),
        ('{"type": "dance"}', "UNKNOWN_TYPE"),
        ('{"type": ["reset"]}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": 3}', "VALIDATION_ERROR"),
        ('{"type": "reset", "more": 1}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": "x"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"environment": "gues"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "[crane]"}}', "VALIDATION_ERROR"),
        ("[" * 30_000, "INVALID_JSON"),
    ],
)
async def test_a_bad_frame_is_a_typed_error_and_the_session_lives_on(
    serve_environment, text: str, code: str
) -> None:
    async with serve_environment() as running, socket_to(running) as socket:
        await socket.send(text)
        answer = json.loads(await socket.recv())
        assert answer["type"] == "error"
        assert answer["data"]["code"] == code
        assert (await ask(socket, type="reset", data={"seed": 1}))["type"] == "observation"


async def test_an_unknown_action_field_is_refused_with_a_suggestion(serve_environment) -> None:
    async with serve_environment() as running, socket_to(running) as socket:
        await ask(socket, type="reset", data={})
        answer = await ask(socket, type="step", data={"mesage": "[crane]"})
        assert answer["data"]["code"] == "VALIDATION_ERROR"
        assert "did you mean 'message'" in answer["data"]["message"]


async def test_a_frame_over_the_limit_closes_the_socket_and_frees_the_session(
    serve_environment,
) -> None:
    async with serve_environment() as running, socket_to(running) as socket:
        await ask(socket, type="reset", data={})
        await socket.send(json.dumps({"type": "step", "data": {"message": "x" * 70_000}}))
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        await running.emptied()


async def test_a_binary_frame_is_refused_and_the_session_lives_on(serve_environment) -> None:
    async with serve_environment() as running, socket_to(running) as socket:
        await socket.send(b"\x00\x01")
        assert json.loads(await socket.recv())["data"]["code"] == "INVALID_JSON"
        assert (await ask(socket, type="state"))["type"] == "state"


async def test_a_repeated_request_id_gets_the_stored_answer_and_is_played_once(
    serve_environment,
) -> None:
    async with serve_environment() as running, socket_to(running) as socket:
        await ask(socket, type="reset", data={"seed": 1})
        guess = {"type": "step", "data": {"guess": "crane"}, "request_id": "one"}
        first, again = await ask(socket, **guess), await ask(socket, **guess)
        assert first == again
        assert first["request_id"] == "one"
        assert (await ask(socket, type="state"))["data"]["step_count"] == 1


async def test_a_cut_client_attaches_again_and_gets_the_answer_it_missed(serve_environment) -> None:
    async with serve_environment() as running:
        async with socket_to(running) as socket:
            await ask(socket, type="reset", data={"seed": 1}, request_id="reset")
            answer = await ask(socket, type="step", data={"guess": "crane"}, request_id="first")
            session_id = await cut(socket)
        async with socket_to(running, f"?session_id={session_id}") as socket:
            same = await ask(socket, type="step", data={"guess": "crane"}, request_id="first")
            assert same == answer
            assert (await ask(socket, type="state"))["data"]["step_count"] == 1


async def test_a_client_that_attaches_replaces_its_own_half_dead_socket(serve_environment) -> None:
    async with serve_environment() as running, socket_to(running) as old:
        await ask(old, type="reset", data={"seed": 1}, request_id="reset")
        session_id = old.response.headers[SESSION_HEADER]
        async with socket_to(running, f"?session_id={session_id}") as new:
            with pytest.raises(ConnectionClosed):
                await old.recv()
            assert (await ask(new, type="step", data={"guess": "crane"}))["type"] == "observation"
            assert len(running.environment.sessions) == 1


async def test_a_cut_client_that_never_sent_a_request_id_leaves_nothing_behind(
    serve_environment,
) -> None:
    async with serve_environment() as running, socket_to(running) as socket:
        await ask(socket, type="reset", data={"seed": 1})
        await cut(socket)
        await running.emptied()


async def test_an_unknown_session_id_is_told_so(serve_environment) -> None:
    async with serve_environment() as running, socket_to(running, "?session_id=nope") as socket:
        answer = json.loads(await socket.recv())
        assert answer["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            await socket.recv()


async def test_a_full_house_tells_how_full_it_is_and_takes_the_next_one_when_one_leaves(
    serve_environment,
) -> None:
    async with serve_environment(max_sessions=1) as running:
        async with socket_to(running):
            async with socket_to(running) as second:
                refusal = json.loads(await second.recv())["data"]
            assert refusal["code"] == "CAPACITY_REACHED"
            assert (refusal["active_sessions"], refusal["max_sessions"]) == (1, 1)
        await running.emptied()
        async with socket_to(running) as third:
            assert (await ask(third, type="reset", data={}))["type"] == "observation"


async def test_a_socket_without_the_token_is_refused(serve_environment) -> None:
    async with serve_environment(token="secret-token") as running:
        with pytest.raises(InvalidStatus):
            async with socket_to(running):
                pass
        headers = {"Authorization": "Bearer secret-token"}
        async with socket_to(running, additional_headers=headers) as socket:
            assert (await ask(socket, type="state"))["type"] == "state"


class Moody:
    """A world of a user who makes mistakes."""

    def reset(self, *, how: str = "") -> str:
        self.how = how
        if how == "reset":
            raise KeyError("no such level")
        return "Hello."

    def step(self, message: str) -> str:
        if message == "crash":
            raise ZeroDivisionError("a user's mistake")
        if message == "exit":
            raise SystemExit(3)
        if message == "no data":
            return Reply(info={"thing": object()})  # type: ignore[dict-item,return-value]
        if message == "no chat":
            return Reply(chat="Hello")  # type: ignore[arg-type,return-value]
        if message == "nonsense":
            return 3.5  # type: ignore[return-value]
        return "Go on."


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("crash", "ZeroDivisionError: a user's mistake"),
        ("exit", "SystemExit"),
        ("nonsense", "return text, a Reply or"),
        ("no data", "no plain data: Object of type object"),
        ("no chat", "no plain data"),
    ],
)
async def test_a_users_mistake_is_a_typed_error_with_a_reason_and_the_session_lives_on(
    serve_environment, message: str, reason: str
) -> None:
    job = Job(name="moody", env=Env(Moody, max_turns=5))
    async with serve_environment(job=job) as running, socket_to(running) as socket:
        failed = await ask(socket, type="reset", data={"how": "reset"})
        assert failed["data"]["code"] == "EXECUTION_ERROR"
        await ask(socket, type="reset", data={})
        answer = await ask(socket, type="step", data={"message": message})
        assert answer["data"]["code"] == "EXECUTION_ERROR"
        assert reason in answer["data"]["message"]
        assert (await ask(socket, type="step", data={"message": "hi"}))["type"] == "observation"
        assert (await running.environment.status()).errors_total == 2


async def test_a_world_on_the_event_loop_cannot_end_the_service_either() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        await Pool(1)(leave, timeout_s=1.0, blocking=False)


class Tidy:
    """A world whose close() takes its time."""

    threads: ClassVar[list[threading.Thread]] = []

    def reset(self) -> str:
        return "Hello."

    def step(self, message: str) -> str:
        return "Go on."

    def close(self) -> None:
        self.threads.append(threading.current_thread())


class TidyAsync(Tidy):
    async def close(self) -> None:
        await asyncio.sleep(0)
        super().close()


@pytest.mark.parametrize("kind", [Tidy, TidyAsync])
async def test_what_a_session_held_is_given_back_beside_the_event_loop(
    serve_environment, kind: type[Tidy]
) -> None:
    kind.threads.clear()
    job = Job(name="tidy", env=Env(kind, max_turns=5))
    async with serve_environment(job=job) as running:
        async with socket_to(running) as socket:
            await ask(socket, type="reset", data={})
            await ask(socket, type="reset", data={})
        async with asyncio.timeout(60):
            while len(kind.threads) < 2:  # noqa: ASYNC110 - other threads set no event
                await asyncio.sleep(0.01)
    on_the_loop = [thread is threading.current_thread() for thread in kind.threads]
    assert on_the_loop == [kind is TidyAsync] * 2


class SlowStart(TidyAsync):
    go_on: ClassVar[asyncio.Event]

    async def reset(self) -> str:
        await self.go_on.wait()
        return "Hello."


async def test_an_episode_that_begins_in_a_closed_session_is_closed_too() -> None:
    SlowStart.threads.clear()
    SlowStart.go_on = asyncio.Event()
    job = resolve(Job(name="slow", env=Env(SlowStart, max_turns=5)))
    environment = Environment(EnvironmentSettings(), job)
    session = environment.sessions.open(owned_by_socket=True)
    starting = asyncio.create_task(environment.episodes.start(session, Task(), episode_id=None))
    await asyncio.sleep(0)
    environment.sessions.close(session)
    SlowStart.go_on.set()
    with pytest.raises(SessionGone):
        await starting
    await environment.close()
    assert len(SlowStart.threads) == 1


class Sleepy:
    """A world that never comes back."""

    release = None

    def reset(self) -> str:
        return "Hello."

    def step(self, message: str) -> str:
        assert Sleepy.release is not None
        Sleepy.release.wait(20)
        return "At last."


async def test_a_hanging_step_is_given_up_and_holds_nobody_else_up(serve_environment) -> None:
    Sleepy.release = threading.Event()
    job = Job(name="sleepy", env=Env(Sleepy))
    settings = {"step_timeout_s": 0.2, "pool_workers": 1}
    try:
        async with serve_environment(job=job, **settings) as running:
            for _ in range(3):
                async with socket_to(running) as socket:
                    await ask(socket, type="reset", data={})
                    answer = await ask(socket, type="step", data={"message": "wake up"})
                    assert answer["data"]["code"] == "EXECUTION_ERROR"
                    assert "gave no answer in time" in answer["data"]["message"]
            assert running.environment.pool.hanging == 3
            Sleepy.release.set()
            for _ in range(500):
                if running.environment.pool.hanging == 0:
                    break
                await asyncio.sleep(0.01)
            assert running.environment.pool.hanging == 0
    finally:
        Sleepy.release.set()
