"""The OpenAI-compatible routes, asked by the real client against the real app."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
import torch

if TYPE_CHECKING:
    from tests.inference.conftest import MakeRun, Serving

Serve = Callable[..., AbstractAsyncContextManager["Serving"]]

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture
async def serving(make_run: "MakeRun", serve: Serve) -> AsyncIterator["Serving"]:
    """One replica that has joined, on a run of a tiny float32 model."""
    async with serve(make_run(dtype=torch.float32)) as replica:
        yield replica


def client_of(serving: "Serving") -> openai.AsyncOpenAI:
    """The real client, over the app in this process."""
    return openai.AsyncOpenAI(
        api_key=serving.token,
        base_url="http://replica/v1",
        http_client=serving.http_client(),
        max_retries=0,
    )


async def test_a_chat_is_answered_whole(serving: "Serving") -> None:
    client = client_of(serving)

    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, max_tokens=12, seed=5, logprobs=True, top_logprobs=4
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == sum(
        len(choice.logprobs.content) for choice in answer.choices
    )
    assert answer.system_fingerprint == "tiny@0"
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert choice.finish_reason in ("stop", "length")
        assert all(len(token.top_logprobs) == 4 for token in choice.logprobs.content)
        assert choice.model_extra["version_spans"][0]["version"] == 0


async def test_a_stream_says_the_same_as_the_whole_answer(serving: "Serving") -> None:
    client = client_of(serving)
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "n": 2,
        "max_completion_tokens": 40,
        "seed": 5,
        "logprobs": True,
    }
    whole = await client.chat.completions.create(**asked)

    texts, counts, finished = ["", ""], [0, 0], {}
    async for event in await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            counts[choice.index] += len(choice.logprobs.content)
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
        usage = event.usage

    assert texts == [choice.message.content for choice in whole.choices]
    assert finished == {c.index: c.finish_reason for c in whole.choices}
    assert counts == [len(choice.logprobs.content) for choice in whole.choices]
    assert usage == whole.usage


async def test_completions_take_text_or_ids_and_give_logprobs(serving: "Serving") -> None:
    client = client_of(serving)
    ids = serving.run.tokenizer.encode("Once")

    by_text = await client.completions.create(
        model="tiny", prompt=["Once", "Twice"], max_tokens=8, temperature=0.0, logprobs=2
    )
    by_ids = await client.completions.create(
        model="tiny",
        prompt=ids,
        max_tokens=8,
        temperature=0.0,
        extra_body={"return_token_ids": True},
    )

    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_ids.model_extra["prompt_token_ids"] == ids
    logprobs = by_text.choices[0].logprobs
    token_ids = by_ids.choices[0].model_extra["token_ids"]
    expected = serving.run.logprobs([*ids, *token_ids])[len(ids) - 1 :]
    assert logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=1e-3)
    for top, own in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True):
        # Bytes that are no character of their own all look alike and share a key.
        assert "\ufffd" in top or max(top.values()) == pytest.approx(own)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_ends_before_the_stop_string(serving: "Serving", stream: bool) -> None:
    client = client_of(serving)
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 60, "seed": 2}
    free = (await client.completions.create(**asked)).choices[0].text
    stop = free[20:23]

    answer = await client.completions.create(**asked, stop=[stop], stream=stream)

    if stream:
        text = "".join([event.choices[0].text async for event in answer])
    else:
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].text
    assert text == free[: free.index(stop)]


async def test_errors_are_those_the_client_knows(serving: "Serving") -> None:
    client = client_of(serving)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny", prompt=[1] * 600)
    with pytest.raises(openai.ConflictError) as caught:
        await client.completions.create(model="tiny", prompt="x", extra_body={"policy_version": 4})
    assert caught.value.response.headers["Retry-After"] == "1"
    with pytest.raises(openai.ConflictError):
        await client.completions.create(
            model="tiny", prompt="x", stream=True, extra_body={"min_version": 4}
        )
    client.api_key = "wrong"
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()


async def test_one_prompt_that_is_refused_frees_the_others(serving: "Serving") -> None:
    await serving.engine.pause()
    with pytest.raises(openai.BadRequestError):
        await client_of(serving).completions.create(model="tiny", prompt=[[1], [1] * 600])
    await serving.engine.pause()  # comes after whatever the engine was told before
    assert serving.engine.load().waiting == 0


async def test_models_lists_the_base_model_and_the_run(serving: "Serving") -> None:
    models = [model.id async for model in client_of(serving).models.list()]

    assert models == ["tiny"]


async def test_a_caller_that_leaves_a_stream_frees_its_row(serving: "Serving") -> None:
    client = client_of(serving)
    stream = await client.completions.create(
        model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()

    while serving.engine.load().running:
        await serving.engine.score([1, 2])
    assert isinstance(client._client, httpx.AsyncClient)
