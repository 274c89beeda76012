"""What the torch engine generates, against plain transformers."""

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from deltawire.protocol.errors import MalformedMessage, VersionNotServed
from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire.protocol.versions import PolicyVersion
from deltawire_inference.engines.torch.core import Limits

if TYPE_CHECKING:
    from tests.inference.conftest import MakeEngine, MakeRun

GREEDY = Sampling(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def prompts(run, count: int, *, shared: int = 12) -> list[list[int]]:
    """Prompts of different lengths that begin alike."""
    generator = torch.Generator().manual_seed(5)

    def ids(size: int) -> list[int]:
        return torch.randint(0, 256, (size,), generator=generator).tolist()

    head = ids(shared)
    return [head + ids(3 + 7 * i) for i in range(count)]


async def test_greedy_tokens_equal_those_of_transformers_generate(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)

    answers = await asyncio.gather(
        *(
            engine.generate(GenerateRequest(prompt_ids=prompt, sampling=GREEDY))
            for prompt in prompts(run, 6)
        )
    )

    for prompt, answer in zip(prompts(run, 6), answers, strict=True):
        expected = run.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        assert answer.completions[0].token_ids == expected[0, len(prompt) :].tolist()
        assert answer.completions[0].finish_reason == "length"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_behaviour_logprobs_equal_a_plain_forward(
    make_run: "MakeRun", make_engine: "MakeEngine", dtype: torch.dtype
) -> None:
    run = make_run(dtype=dtype)
    engine, _ = await make_engine(run)
    prompt = prompts(run, 1)[0]
    sampling = Sampling(temperature=0.7, max_new_tokens=32, seed=3, ignore_eos=True)

    answer = await engine.generate(GenerateRequest(prompt_ids=prompt, n=8, sampling=sampling))

    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    for completion in answer.completions:
        expected = run.logprobs([*prompt, *completion.token_ids], temperature=0.7)
        found = torch.tensor(completion.logprobs)
        assert (found - expected[len(prompt) - 1 :]).abs().max() < tolerance
        # bf16 noise has no direction; a wrong distribution would have one.
        assert (found - expected[len(prompt) - 1 :]).mean().abs() < tolerance / 4


async def test_a_seeded_request_draws_the_same_whoever_runs_beside_it(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run, limits=Limits(max_rows=5, max_step_tokens=40))
    prompt, *others = prompts(run, 4)
    seeded = GenerateRequest(
        prompt_ids=prompt, n=2, sampling=Sampling(max_new_tokens=16, seed=11, ignore_eos=True)
    )
    noise = Sampling(max_new_tokens=40, ignore_eos=True)

    alone = await engine.generate(seeded)
    beside, *_ = await asyncio.gather(
        engine.generate(seeded),
        *(engine.generate(GenerateRequest(prompt_ids=p, n=3, sampling=noise)) for p in others),
    )

    for first, second in zip(alone.completions, beside.completions, strict=True):
        assert first.token_ids == second.token_ids
    assert alone.completions[0].token_ids != alone.completions[1].token_ids


async def test_score_gives_the_logprob_of_each_token(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)
    token_ids = prompts(run, 3)[2]

    scores = await engine.score(token_ids)

    assert scores[0] == 0.0
    torch.testing.assert_close(
        torch.tensor(scores[1:]), run.logprobs(token_ids), atol=1e-4, rtol=1e-4
    )


async def test_a_next_turn_starts_from_the_kept_prefix_and_draws_the_same(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)
    fresh, _ = await make_engine(run)
    prompt = prompts(run, 1)[0]
    first = await engine.generate(
        GenerateRequest(prompt_ids=prompt, sampling=GREEDY, session="episode-1")
    )
    turn = GenerateRequest(
        prompt_ids=[*prompt, *first.completions[0].token_ids, 1, 2, 3],
        sampling=GREEDY,
        session="episode-1",
    )

    again, expected = await asyncio.gather(engine.generate(turn), fresh.generate(turn))

    assert again.completions[0].token_ids == expected.completions[0].token_ids
    torch.testing.assert_close(
        again.completions[0].logprobs, expected.completions[0].logprobs, atol=1e-4, rtol=1e-4
    )


async def test_a_completion_ends_at_a_stop_id_a_stop_string_or_eos(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)
    prompt = prompts(run, 1)[0]
    whole = (await engine.generate(GenerateRequest(prompt_ids=prompt, sampling=GREEDY))).completions
    token_ids = whole[0].token_ids
    stop_at = next(i for i, t in enumerate(token_ids) if i > 2 and t not in token_ids[:i])

    by_id = GREEDY.model_copy(update={"stop_token_ids": [token_ids[stop_at]]})
    ended = (await engine.generate(GenerateRequest(prompt_ids=prompt, sampling=by_id))).completions

    assert ended[0].token_ids == token_ids[: stop_at + 1]
    assert ended[0].finish_reason == "stop"

    letters = [i for i in range(256) if run.tokenizer.decode([i]).isascii()]
    spoken = Sampling(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    text_ids = run.tokenizer("say it", add_special_tokens=False)["input_ids"]
    said = (
        await engine.generate(GenerateRequest(prompt_ids=text_ids, sampling=spoken))
    ).completions
    plain = next(t for t in said[0].token_ids if t in letters)
    by_text = spoken.model_copy(update={"stop": [run.tokenizer.decode([plain])]})
    cut = (
        await engine.generate(GenerateRequest(prompt_ids=text_ids, sampling=by_text))
    ).completions
    assert cut[0].finish_reason == "stop"
    assert cut[0].token_ids == said[0].token_ids[: said[0].token_ids.index(plain) + 1]


async def test_a_truncated_row_returns_what_could_have_been_drawn(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run(dtype=torch.float32)
    engine, _ = await make_engine(run)
    sampling = Sampling(top_k=5, max_new_tokens=10, seed=1, ignore_eos=True)

    answer = await engine.generate(
        GenerateRequest(
            prompt_ids=[1, 2, 3], sampling=sampling, want_sampling_mask=True, top_logprobs=7
        )
    )

    completion = answer.completions[0]
    assert completion.sampling_mask is not None and completion.top_logprobs is not None
    for token_id, logprob, allowed, top in zip(
        completion.token_ids,
        completion.logprobs,
        completion.sampling_mask,
        completion.top_logprobs,
        strict=True,
    ):
        assert token_id in allowed and len(allowed) == 5
        assert top[token_id] == pytest.approx(logprob)
        assert sum(torch.tensor([top[i] for i in allowed]).exp().tolist()) == pytest.approx(1.0)


async def test_impossible_requests_are_refused_and_the_engine_goes_on(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, _ = await make_engine(run)

    for prompt in ([5, 10**6], [-1], [1] * 600):
        with pytest.raises(MalformedMessage):
            await engine.generate(GenerateRequest(prompt_ids=prompt, sampling=GREEDY))
    with pytest.raises(VersionNotServed):
        await engine.generate(GenerateRequest(prompt_ids=[1], policy_version=PolicyVersion(9)))
    with pytest.raises(VersionNotServed):
        await engine.generate(GenerateRequest(prompt_ids=[1], min_version=PolicyVersion(1)))

    answer = await engine.generate(GenerateRequest(prompt_ids=[1], sampling=GREEDY))
    assert len(answer.completions[0].token_ids) == 24


async def test_a_caller_that_leaves_frees_its_rows(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, _ = await make_engine(run)
    endless = Sampling(max_new_tokens=400, ignore_eos=True)
    task = asyncio.create_task(
        engine.generate(GenerateRequest(prompt_ids=[1], n=4, sampling=endless))
    )
    stream = engine.stream(GenerateRequest(prompt_ids=[2], sampling=endless))
    assert (await anext(stream)).token_id is not None

    task.cancel()
    await asyncio.wait([task])
    await stream.aclose()
    await engine.score([1, 2])  # an errand: everything posted before it is done

    assert engine.load().running == engine.load().waiting == 0


async def test_a_paused_engine_makes_no_token_until_it_resumes(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, _ = await make_engine(run)
    await engine.pause()
    task = asyncio.create_task(engine.generate(GenerateRequest(prompt_ids=[1], sampling=GREEDY)))
    await engine.score([1, 2])
    made = engine.load().tokens_total

    assert not task.done() and made == 0

    await engine.resume()
    assert len((await task).completions[0].token_ids) == 24
