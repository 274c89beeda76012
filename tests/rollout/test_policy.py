"""The policy over HTTP: affinity, failing replicas, versions, aborted completions."""

import httpx
import pytest

from deltawire.protocol.errors import EngineError, RemoteError, VersionNotServed
from deltawire.protocol.generation import GenerateRequest, GenerateResponse, Sampling
from deltawire.rollout.completer import Completer, joined
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.policy import HttpPolicy
from deltawire.rollout.waits import Waits

URLS = ["http://a", "http://b", "http://c"]


class Fleet(httpx.AsyncBaseTransport):
    """Replicas by host name; each answers as told, and by default well."""

    def __init__(self, completion) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, list[httpx.Response | Exception]] = {}
        self._completion = completion

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.asked.append(host)
        if self.answers.get(host):
            answer = self.answers[host].pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        body = GenerateResponse(completions=[self._completion([5, 6])], replica_id=host)
        return httpx.Response(200, json=body.model_dump(mode="json"))


@pytest.fixture
def fleet(make_completion) -> Fleet:
    return Fleet(make_completion)


def ask(session: str = "", **changes: object) -> GenerateRequest:
    return GenerateRequest.model_validate({"prompt_ids": [1], "session": session, **changes})


async def test_turns_of_a_session_go_to_one_replica(fleet):
    policy = HttpPolicy(URLS, transport=fleet)
    for _ in range(5):
        await policy.generate(ask("episode-1"))
    assert len(set(fleet.asked)) == 1


async def test_a_failing_replica_hands_its_sessions_over(fleet):
    policy = HttpPolicy(URLS, transport=fleet)
    home = (await policy.generate(ask("episode-1"))).replica_id
    fleet.answers[home] = [httpx.ConnectError("gone")]
    moved = (await policy.generate(ask("episode-1"))).replica_id
    assert moved != home
    assert (await policy.generate(ask("episode-1"))).replica_id == moved


@pytest.mark.parametrize(
    "sleepy",
    [
        httpx.Response(503),
        httpx.Response(429),
        httpx.Response(200, html="<html>Building your Space</html>"),
        httpx.ReadTimeout("slow"),
        httpx.DecodingError("a packed answer, cut short by a proxy"),
    ],
)
async def test_a_waking_replica_is_asked_again(fleet, sleepy):
    fleet.answers["a"] = [sleepy]
    policy = HttpPolicy(["http://a"], transport=fleet)
    assert (await policy.generate(ask())).replica_id == "a"
    assert fleet.asked == ["a", "a"]


async def test_replicas_that_never_answer_are_given_up(fleet):
    fleet.answers["a"] = [httpx.ConnectError("gone")] * 50
    policy = HttpPolicy(["http://a"], transport=fleet, patience_s=0.2)
    with pytest.raises(EngineError, match="no replica answered"):
        await policy.generate(ask())


async def test_a_version_not_served_says_when_to_ask_again(fleet):
    fleet.answers["a"] = [httpx.Response(409, headers={"Retry-After": "7"}, json={})]
    policy = HttpPolicy(["http://a"], transport=fleet)
    with pytest.raises(VersionNotServed) as raised:
        await policy.generate(ask(policy_version=3))
    assert (raised.value.wanted, raised.value.retry_after_s) == (3, 7.0)


async def test_a_pinned_version_that_has_passed_is_not_waited_for(fleet):
    headers = {"Retry-After": "7", "X-Deltawire-Serving": "9"}
    fleet.answers["a"] = [httpx.Response(409, headers=headers, json={})]
    completer = Completer(HttpPolicy(["http://a"], transport=fleet), waits=Waits())
    with pytest.raises(VersionNotServed) as raised:
        await completer.complete(ask(policy_version=3), deadline=Deadline.after(60))
    assert raised.value.serving == 9


@pytest.mark.parametrize("answer", [httpx.Response(401), httpx.Response(200, json={"x": 1})])
async def test_what_is_no_completion_is_an_error_with_its_status(fleet, answer):
    fleet.answers["a"] = [answer]
    policy = HttpPolicy(["http://a"], transport=fleet)
    with pytest.raises(RemoteError, match=str(answer.status_code)):
        await policy.generate(ask())


class Updated:
    """A replica whose updates abort what runs: 2 tokens at a time, each by the next version."""

    def __init__(self, completion, total: int) -> None:
        self.requests: list[GenerateRequest] = []
        self._completion, self._total = completion, total

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        self.requests.append(request)
        made = len(request.prompt_ids) - 3
        ids = list(range(100 + made, 100 + min(made + 2, self._total)))
        finish = "stop" if made + 2 >= self._total else "abort"
        version = len(self.requests)
        answer = self._completion(ids, version=version, finish=finish)
        return GenerateResponse(completions=[answer] * request.n, replica_id="r")


async def test_an_aborted_completion_goes_on_from_its_prefix(make_completion):
    policy = Updated(make_completion, total=5)
    request = GenerateRequest(prompt_ids=[1, 2, 3], sampling=Sampling(max_new_tokens=9))
    sampled = await Completer(policy, waits=Waits()).complete(request, deadline=Deadline.after(5))

    [whole] = sampled.completions
    assert whole.token_ids == [100, 101, 102, 103, 104]
    assert [(s.version, s.start, s.end) for s in whole.spans] == [(1, 0, 2), (2, 2, 4), (3, 4, 5)]
    assert whole.finish_reason == "stop"
    assert [r.prompt_ids[3:] for r in policy.requests] == [[], [100, 101], [100, 101, 102, 103]]
    assert [r.sampling.max_new_tokens for r in policy.requests] == [9, 7, 5]


async def test_an_aborted_completion_without_room_ends_by_length(make_completion):
    policy = Updated(make_completion, total=50)
    request = GenerateRequest(prompt_ids=[1, 2, 3], sampling=Sampling(max_new_tokens=4))
    sampled = await Completer(policy, waits=Waits()).complete(request, deadline=Deadline.after(5))
    assert sampled.completions[0].finish_reason == "length"
    assert len(sampled.completions[0].token_ids) == 4


async def test_fewer_completions_than_asked_are_an_error(fleet):
    completer = Completer(HttpPolicy(["http://a"], transport=fleet), waits=Waits())
    with pytest.raises(EngineError, match="3 completions"):
        await completer.complete(ask(n=3), deadline=Deadline.after(5))


def test_joined_parts_of_one_version_are_one_span(make_completion):
    first = make_completion([1, 2], version=4, finish="abort")
    whole = joined(first, make_completion([3], version=4))
    assert [(s.version, s.start, s.end) for s in whole.spans] == [(4, 0, 3)]
    assert whole.logprobs == [-0.5] * 3


def test_facts_that_one_part_lacks_are_left_out(make_completion):
    first = make_completion([1], finish="abort").model_copy(update={"sampling_mask": [[1, 2]]})
    assert joined(first, make_completion([3])).sampling_mask is None
