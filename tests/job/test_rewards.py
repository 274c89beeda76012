"""Reward functions: signatures, weights, errors, and a scorer behind HTTP."""

import asyncio
import math

import httpx
import pytest

from deltawire.job import HttpScorer, Message, Score, Transcript, reward
from deltawire.job.rehearsal import run_directly
from deltawire.job.scoring import score_episode
from deltawire.protocol.errors import JobError, RemoteError
from deltawire.protocol.rollouts import Task


def transcript(said: str = "four", **row: object) -> Transcript:
    messages = [Message(role="user", content="2+2?"), Message(role="assistant", content=said)]
    return Transcript(task=Task(row=row), messages=messages, prompt_length=1)


async def scored(*rewards, episode: Transcript | None = None):
    return await score_episode(rewards, episode or transcript(), run=run_directly)


async def test_weights_multiply_values_and_parts_stay_as_they_were() -> None:
    @reward(weight=2.0)
    def one(episode: Transcript) -> float:
        return 1.0

    @reward(weight=-0.5, name="penalty")
    async def other(episode: Transcript) -> bool:
        return True

    score = await scored(one, other)
    assert score.reward == 1.5
    assert score.parts == {"one": 1.0, "penalty": 1.0}


async def test_a_trl_function_gets_lists_of_one_and_the_columns_of_the_row() -> None:
    @reward
    def exact(completions, prompts, answer, **kwargs):
        assert prompts == ["2+2?"]
        assert kwargs == {"source": ["book"]}
        return [float(said == right) for said, right in zip(completions, answer, strict=True)]

    episode = transcript("4", answer="4", source="book")
    assert (await scored(exact, episode=episode)).reward == 1.0


async def test_a_trl_function_of_a_conversational_row_gets_messages() -> None:
    @reward
    def last_word(completions):
        return [float(messages[-1]["content"] == "four") for messages in completions]

    episode = transcript(prompt=[{"role": "user", "content": "2+2?"}])
    assert (await scored(last_word, episode=episode)).reward == 1.0


def test_a_function_that_no_episode_fits_is_refused_where_it_is_written() -> None:
    with pytest.raises(JobError, match=r"bad\(a, b\) cannot be a reward: it takes \(episode\)"):

        @reward
        def bad(a, b):
            return 1.0


async def test_a_column_that_the_row_lacks_is_named_beside_those_it_has() -> None:
    @reward
    def exact(completions, label):
        return [1.0]

    score = await scored(exact, episode=transcript("4", answer="4"))
    assert score.reward is None
    assert "asks for label" in score.errors["exact"]
    assert "completions, prompts, answer" in score.errors["exact"]


async def test_text_is_no_reward_and_the_message_says_what_was_returned() -> None:
    @reward
    def bad(episode):
        return "good"

    assert "bad returned 'good'; a reward is a number" in (await scored(bad)).errors["bad"]


async def test_none_means_that_a_part_does_not_apply() -> None:
    @reward
    def absent(episode: Transcript) -> None:
        return None

    @reward
    def absent_too(completions):
        return [None]

    score = await scored(absent, absent_too)
    assert score.reward == 0.0
    assert score.parts == {}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, "text", [1.0, 2.0], []])
async def test_what_is_no_finite_number_is_an_error_and_no_zero(wrong: object) -> None:
    @reward
    def odd(episode: Transcript):
        return wrong

    score = await scored(odd)
    assert score.reward is None
    assert list(score.errors) == ["odd"]


async def test_an_error_counts_as_zero_only_when_told_so() -> None:
    @reward(on_error="zero")
    def fragile(episode: Transcript) -> float:
        raise RuntimeError("no")

    @reward
    def solid(episode: Transcript) -> float:
        return 1.0

    score = await scored(fragile, solid)
    assert score.reward == 1.0
    assert "RuntimeError: no" in score.errors["fragile"]


async def test_turn_scores_are_weighted_and_added() -> None:
    @reward(weight=2.0)
    def first(episode: Transcript) -> Score:
        return Score(value=1.0, turns=[0.5, 1.0])

    @reward
    def second(episode: Transcript) -> Score:
        return Score(value=0.0, turns=[1.0])

    assert (await scored(first, second)).turns == [2.0, 2.0]


def test_a_reward_is_still_the_function_it_was() -> None:
    @reward(weight=3.0)
    def double(n: int) -> int:
        return 2 * n

    assert double(4) == 8


class Judge:
    """A scoring service that answers from a list of status codes, then well."""

    def __init__(self, *failures: int) -> None:
        self.failures = list(failures)
        self.batches: list[int] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.failures:
            return httpx.Response(self.failures.pop(0), text="not now")
        import json

        episodes = json.loads(request.content)["episodes"]
        self.batches.append(len(episodes))
        scores = [{"reward": float(len(e["messages"][-1]["content"]))} for e in episodes]
        return httpx.Response(200, json={"scores": scores, "judge": "newer than us"})


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch):
    def serve(judge: Judge) -> HttpScorer:
        client = httpx.AsyncClient
        transport = httpx.MockTransport(judge)
        monkeypatch.setattr(
            httpx, "AsyncClient", lambda **options: client(transport=transport, **options)
        )
        monkeypatch.setattr("deltawire.job.http_scorer._RETRY_WAITS_S", (0.0, 0.0))
        return HttpScorer("http://judge/score", weight=0.5, batch=8)

    return serve


async def test_scores_of_one_moment_travel_as_one_batch_and_are_asked_for_once(judged) -> None:
    judge = Judge()
    scorer = judged(judge)
    answers = await asyncio.gather(*(scorer.score(transcript("x" * n)) for n in (1, 2, 3, 1)))
    assert [answer.value for answer in answers] == [1.0, 2.0, 3.0, 1.0]
    await scorer.score(transcript("x"))
    assert judge.batches == [3]


async def test_a_large_moment_is_split_into_batches(judged) -> None:
    judge = Judge()
    scorer = judged(judge)
    await asyncio.gather(*(scorer.score(transcript("x" * n)) for n in range(1, 21)))
    assert sum(judge.batches) == 20
    assert max(judge.batches) <= 8


async def test_a_busy_judge_is_asked_again_and_a_refusing_one_is_not(judged) -> None:
    judge = Judge(503, 429)
    assert (await judged(judge).score(transcript("abc"))).value == 3.0


async def test_a_refusing_judge_is_not_asked_again(judged) -> None:
    refusing = Judge(400, 503)
    with pytest.raises(RemoteError, match="400: not now"):
        await judged(refusing).score(transcript("abc"))
    assert refusing.failures == [503]


async def test_a_failure_is_not_remembered(judged) -> None:
    judge = Judge(400)
    scorer = judged(judge)
    with pytest.raises(RemoteError):
        await scorer.score(transcript("abc"))
    assert (await scorer.score(transcript("abc"))).value == 3.0


async def test_an_answer_of_the_wrong_length_is_an_error(judged) -> None:
    async def short(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"scores": []})

    with pytest.raises(RemoteError, match="1 episodes were sent, 0 scores came back"):
        await judged(short).score(transcript("abc"))


async def test_a_metric_that_is_no_number_travels_and_keeps_nobody_waiting(judged) -> None:
    odd = transcript("abc")
    odd.metrics["valid"] = math.nan
    async with asyncio.timeout(60.0):
        assert (await judged(Judge()).score(odd)).value == 3.0


async def test_whatever_goes_wrong_with_a_batch_is_told_to_all_who_wait(judged) -> None:
    async def broken(request: httpx.Request) -> httpx.Response:
        raise LookupError("no such judge")

    scorer = judged(broken)
    async with asyncio.timeout(60.0):
        failures = await asyncio.gather(
            *(scorer.score(transcript("x" * n)) for n in (1, 2)), return_exceptions=True
        )
    assert [type(failure) for failure in failures] == [RemoteError, RemoteError]
    assert "LookupError: no such judge" in str(failures[0])
