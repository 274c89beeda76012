"""The HTTP side: OpenEnv's routes, sessions by header, the job, scores, limits."""

import asyncio
import time

import pytest

from deltawire.job import Env, Job, Transcript, reward
from deltawire.job.spec import JobSpec
from deltawire.protocol.control import EnvironmentStatus
from deltawire_environment.ws import SESSION_HEADER


async def test_reset_and_step_without_a_session_stand_alone_as_openenvs_do(
    serve_environment,
) -> None:
    async with serve_environment() as running, running.http() as http:
        first = (await http.post("/reset", json={"seed": 4})).json()
        assert first["done"] is False
        assert first["reward"] is None
        step = await http.post("/step", json={"action": {"message": "[crane]"}})
        assert step.json()["observation"]["turn"] == 1
        assert (await http.get("/state")).json()["step_count"] == 0
        assert len(running.environment.sessions) == 0


async def test_a_session_header_makes_http_keep_its_episode(serve_environment) -> None:
    async with serve_environment() as running, running.http() as http:
        opened = await http.post("/reset", json={"seed": 4}, headers={SESSION_HEADER: "new"})
        session = {SESSION_HEADER: opened.headers[SESSION_HEADER]}
        body = {"action": {"guess": "crane"}, "request_id": "a"}
        first = (await http.post("/step", json=body, headers=session)).json()
        again = (await http.post("/step", json=body, headers=session)).json()
        assert first == again
        assert (await http.get("/state", headers=session)).json()["step_count"] == 1
        assert (await http.request("DELETE", "/session", headers=session)).status_code == 204
        assert (await http.get("/state", headers=session)).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/reset", {"seed": -1}),
        ("/reset", {"seed": 1, "environment": "gues"}),
        ("/step", {"action": {"mesage": "[crane]"}}),
        ("/step", {"action": "crane"}),
        ("/step", {}),
    ],
)
async def test_a_bad_request_is_422_with_a_reason(serve_environment, path: str, body: dict) -> None:
    async with serve_environment() as running, running.http() as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 422
        assert answer.json()["detail"]


async def test_a_body_over_the_limit_is_413(serve_environment) -> None:
    async with serve_environment(body_bytes=1000) as running, running.http() as http:
        answer = await http.post("/step", json={"action": {"message": "x" * 2000}})
        assert answer.status_code == 413
        assert (await http.post("/reset", json={})).status_code == 200


async def test_a_full_house_answers_503_and_retry_after(serve_environment) -> None:
    async with serve_environment(max_sessions=1) as running, running.http() as http:
        await http.post("/reset", json={}, headers={SESSION_HEADER: "new"})
        answer = await http.post("/reset", json={})
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        assert (await http.get("/capacity")).json() == {
            "active_sessions": 1,
            "max_sessions": 1,
            "free_sessions": 0,
        }


async def test_the_description_routes_say_what_an_openenv_client_needs(serve_environment) -> None:
    async with serve_environment() as running, running.http() as http:
        schema = (await http.get("/schema")).json()
        assert schema["action"]["required"] == ["message"]
        assert schema["state"]["properties"]["step_count"]
        assert (await http.get("/metadata")).json()["name"] == "guess"
        assert (await http.get("/health")).json() == {"status": "healthy"}
        assert (await http.get("/readyz")).json()["ready"] is True


async def test_status_is_the_protocols_record(serve_environment) -> None:
    async with serve_environment(worlds=["guess", "letters"]) as running, running.http() as http:
        await http.post("/step", json={"action": {"message": "[crane]"}})
        status = EnvironmentStatus.model_validate((await http.get("/status")).json())
        assert status.worlds == ["guess", "letters"]
        assert (status.steps_total, status.active_sessions) == (1, 0)


async def test_another_world_is_chosen_by_name_at_reset(serve_environment) -> None:
    async with serve_environment(worlds=["guess", "letters"]) as running, running.http() as http:
        reset = await http.post("/reset", json={"environment": "letters", "seed": 1})
        assert "letter" in reset.json()["observation"]["text"] or "letter" in str(reset.json())


async def test_tasks_are_listed_without_their_answers(serve_environment) -> None:
    async with serve_environment(worlds=["guess", "letters"]) as running, running.http() as http:
        assert (await http.get("/list_environments")).json() == ["guess", "letters"]
        splits = (await http.get("/guess/splits")).json()
        assert {"name": "eval", "type": "validation"} in splits
        count = (await http.post("/guess/num_tasks", json={"split": "train"})).json()["num_tasks"]
        assert count > 1000
        task = (await http.post("/guess/task", json={"split": "eval", "index": 3})).json()["task"]
        assert task == {"split": "eval", "index": 3, "seed": 3}
        body = {"split": "eval", "start": 1, "stop": 3}
        assert len((await http.post("/guess/task_range", json=body)).json()["tasks"]) == 2
        assert (await http.post("/letters/num_tasks", json={"split": "train"})).status_code == 501
        body = {"split": "eval", "index": 10**6}
        assert (await http.post("/guess/task", json=body)).status_code == 400
        assert (await http.get("/nobody/splits")).status_code == 404


async def test_a_listed_task_can_be_played_by_its_index(serve_environment) -> None:
    async with serve_environment() as running, running.http() as http:
        ends = []
        for _ in range(2):
            reset = await http.post(
                "/reset",
                json={"split": "eval", "index": 3},
                headers={SESSION_HEADER: "new"},
            )
            session = {SESSION_HEADER: reset.headers[SESSION_HEADER]}
            done = False
            while not done:
                body = {"action": {"message": "no guess"}}
                result = (await http.post("/step", json=body, headers=session)).json()
                done = result["done"]
            ends.append(result["observation"]["info"]["secret"])
        assert ends[0] == ends[1]


@reward(weight=2.0)
def polite(episode: Transcript) -> float:
    return float("please" in episode.last)


class Echo:
    def reset(self) -> str:
        return "Say something."

    def step(self, message: str) -> tuple[str, None, bool]:
        return "", None, True


async def test_the_job_is_shown_resolved_and_scores_can_be_asked_for(serve_environment) -> None:
    job = Job(name="echo", env=Env(Echo), rewards=[polite], train={"lr": 3e-6})
    async with serve_environment(job=job) as running, running.http() as http:
        spec = JobSpec.model_validate((await http.get("/job")).json())
        assert (spec.name, spec.env.name, spec.train.lr) == ("echo", "echo", 3e-6)
        episodes = [
            {"messages": [{"role": "assistant", "content": text}]} for text in ("please", "now!")
        ]
        answer = (await http.post("/score", json={"episodes": episodes})).json()
        assert [score["reward"] for score in answer["scores"]] == [2.0, 0.0]
        assert answer["scores"][0]["parts"] == {"polite": 1.0}


async def test_without_a_job_there_is_no_job_and_no_score(serve_environment) -> None:
    async with serve_environment() as running, running.http() as http:
        assert (await http.get("/job")).status_code == 404
        body = {"episodes": [{"messages": []}]}
        assert (await http.post("/score", json=body)).status_code == 409


@pytest.mark.parametrize(
    "path", ["/job", "/state", "/status", "/schema", "/capacity", "/metrics", "/docs"]
)
async def test_every_route_but_health_needs_the_token(serve_environment, path: str) -> None:
    async with serve_environment(token="secret-token") as running, running.http() as http:
        assert (await http.get(path)).status_code == 401
        assert (await http.get("/health")).status_code == 200
        header = {"X-Deltawire-Token": "secret-token"}
        assert (await http.get("/status", headers=header)).status_code == 200


async def test_mcp_lists_and_calls_tools_and_keeps_sessions(serve_environment) -> None:
    async with serve_environment() as running, running.http() as http:

        async def rpc(method: str, **params: object) -> dict:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await http.post("/mcp", json=body)).json()

        assert (await rpc("initialize"))["result"]["capabilities"] == {"tools": {}}
        assert (await rpc("tools/list"))["result"]["tools"][0]["name"] == "guess"
        session = (await rpc("openenv/session/create"))["result"]["session_id"]
        first = await rpc(
            "tools/call", name="guess", arguments={"guess": "crane"}, session_id=session
        )
        assert "Guesses left: 5" in first["result"]["content"][0]["text"]
        second = await rpc(
            "tools/call", name="guess", arguments={"guess": "moist"}, session_id=session
        )
        assert "Guesses left: 4" in second["result"]["data"]
        closed = await rpc("openenv/session/close", session_id=session)
        assert closed["result"] == {"session_id": session, "closed": True}
        assert (await rpc("tools/list", session_id=session))["error"]["code"] == -32602
        assert (await rpc("tools/call", name="gess", arguments={}))["error"]["code"] == -32602
        assert (await rpc("resources/list"))["error"]["code"] == -32601
        assert (await http.post("/mcp", content=b"{")).json()["error"]["code"] == -32700
        assert len(running.environment.sessions) == 0


class OneAtATime:
    """Notes when two calls of one object run side by side."""

    overlaps = 0

    def reset(self) -> str:
        self.busy = False
        return "Hello."

    def step(self, message: str) -> str:
        OneAtATime.overlaps += self.busy
        self.busy = True
        time.sleep(0.05)
        self.busy = False
        return "Go on."


async def test_mcp_calls_of_one_session_wait_for_each_other(serve_environment) -> None:
    OneAtATime.overlaps = 0
    job = Job(name="one", env=Env(OneAtATime, max_turns=50))
    async with serve_environment(job=job) as running, running.http() as http:

        async def rpc(method: str, **params: object) -> dict:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await http.post("/mcp", json=body)).json()["result"]

        session = (await rpc("openenv/session/create"))["session_id"]
        call = {"name": "act", "arguments": {"message": "x"}, "session_id": session}
        said = await asyncio.gather(*(rpc("tools/call", **call) for _ in range(4)))
    assert [answer["data"] for answer in said] == ["Go on."] * 4
    assert OneAtATime.overlaps == 0
