"""Whatever is sent to any route of the OpenAPI document, the service answers for itself: no 5xx."""

import json
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from deltawire.job import Env, Job
from deltawire.job.resolve import resolve
from deltawire_environment.app import Environment, create_app
from deltawire_environment.settings import EnvironmentSettings
from deltawire_environment.ws import SESSION_HEADER

NOT_IMPLEMENTED = 501
"""OpenEnv's own answer for tasks of a world that lists none."""

names = st.sampled_from(
    [
        "seed",
        "split",
        "index",
        "environment",
        "action",
        "message",
        "guess",
        "episodes",
        "messages",
        "start",
        "stop",
        "task",
        "row",
        "jsonrpc",
        "method",
        "params",
        "id",
        "request_id",
        "arguments",
    ]
)
words = st.sampled_from(
    ["guess", "train", "eval", "2.0", "tools/call", "tools/list", "[crane]", ""]
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    environment = Environment(
        EnvironmentSettings(worlds=["guess", "letters"], max_sessions=10_000), None
    )
    with TestClient(create_app(environment), raise_server_exceptions=False) as http:
        yield http


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_request_makes_the_service_fail(client: TestClient, data: st.DataObject) -> None:
    routes = client.get("/openapi.json").json()["paths"]
    path = data.draw(st.sampled_from(sorted(routes)))
    method = data.draw(st.sampled_from(sorted(routes[path])))
    url = path.replace("{env_name}", data.draw(st.sampled_from(["guess", "letters", "none"])))
    headers = data.draw(st.sampled_from([{}, {SESSION_HEADER: "new"}, {SESSION_HEADER: "x"}]))
    body = data.draw(plain) if method == "post" else None
    content = json.dumps(body) if method == "post" else None  # NaN and Infinity among them
    answer = client.request(
        method.upper(),
        url,
        content=content,
        headers={"Content-Type": "application/json", **headers},
    )
    assert answer.status_code < 500 or answer.status_code == NOT_IMPLEMENTED, (
        url,
        body,
        answer.text,
    )


@pytest.mark.timeout(900)
def test_schemathesis_finds_no_request_that_makes_the_service_fail(
    serve_in_thread, fuzz: Callable[..., None]
) -> None:
    rows = [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(9)]

    def right(completions: list[str], answer: list[str]) -> list[float]:
        return [float(said == told) for said, told in zip(completions, answer, strict=True)]

    job = Job(name="listed", env=Env(dataset=rows), rewards=[right])
    settings_ = EnvironmentSettings(worlds=["guess", "letters", "tools"], max_sessions=10_000)
    environment = Environment(settings_, resolve(job))
    with serve_in_thread(create_app(environment)) as url:
        fuzz(url, env_name="dataset")
