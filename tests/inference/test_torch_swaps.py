"""Weights swapped while requests run, in each mode; and updates that must not get in."""

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltawire.codec.digest import digest_tensors
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import EngineError, VersionNotServed, WeightsError
from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire.protocol.versions import PolicyVersion
from deltawire_inference.engines.base import SwapMode
from deltawire_inference.engines.torch.engine import TorchEngine

if TYPE_CHECKING:
    from tests.inference.conftest import MakeEngine, MakeRun, TinyRun

LENGTH = 400
"""Long enough that a swap falls into it on any machine."""
LONG = Sampling(max_new_tokens=LENGTH, seed=4, ignore_eos=True)


async def tokens_made(engine: TorchEngine, count: int) -> None:
    """Wait until the engine has made so many tokens in all."""
    while engine.load().tokens_total < count:  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.002)


def equal_weights(engine: TorchEngine, run: "TinyRun") -> bool:
    """Bit by bit."""
    live = dict(engine.live_tensors())
    return all(
        torch.equal(live[name].view(torch.int16), tensor.detach().view(torch.int16))
        for name, tensor in run.model.named_parameters()
    )


@pytest.mark.parametrize("mode", ["keep", "keep_kv", "drain", "abort"])
async def test_requests_in_flight_survive_a_swap_and_say_who_made_each_token(
    make_run: "MakeRun", make_engine: "MakeEngine", mode: SwapMode
) -> None:
    run = make_run(dtype=torch.float32)
    engine, follower = await make_engine(run)
    requests = [
        GenerateRequest(prompt_ids=[7, i, 9], n=2, sampling=LONG, session=f"s{i}") for i in range(4)
    ]
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.publish()
    staged = await run.stage(engine, follower)
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await tokens_made(engine, 40)

    report = await engine.apply(staged, mode=mode)
    answers = await asyncio.gather(*tasks)

    assert engine.version == 1 and engine.digest == run.publisher.digest == report.digest
    assert (report.recomputed_tokens > 0) == (mode == "keep")
    for request, answer in zip(requests, answers, strict=True):
        for completion in answer.completions:
            versions = [span.version for span in completion.spans]
            if mode == "drain":
                assert versions == [0] and len(completion.token_ids) == LENGTH
            elif mode == "abort":
                assert versions == [0] and completion.finish_reason == "abort"
                assert 0 < len(completion.token_ids) < LENGTH
            else:
                assert versions == [0, 1] and len(completion.token_ids) == LENGTH
            cut = completion.spans[0].end
            whole = [*request.prompt_ids, *completion.token_ids]
            found = torch.tensor(completion.logprobs)
            after = run.logprobs(whole)[2:]
            if mode == "keep":  # the KV is that of the new weights: as if they had been there
                torch.testing.assert_close(found[cut:], after[cut:], atol=1e-4, rtol=1e-4)
            if mode == "keep_kv":
                assert (found[cut:] - after[cut:]).abs().max() > 1e-3
            run.model.load_state_dict(before)
            torch.testing.assert_close(
                found[:cut], run.logprobs(whole)[2:][:cut], atol=1e-4, rtol=1e-4
            )
            run.model.load_state_dict(dict(engine.live_tensors()), strict=False)


async def test_prefixes_of_the_old_weights_are_forgotten(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run(dtype=torch.float32)
    engine, follower = await make_engine(run)
    prompt = list(range(40))
    request = GenerateRequest(prompt_ids=prompt, sampling=LONG, session="s")
    await engine.generate(request)
    run.publish()

    await run.follow(engine, follower, mode="keep_kv")
    completion = (await engine.generate(request)).completions[0]

    expected = run.logprobs([*prompt, *completion.token_ids])[39:]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)


async def test_a_pinned_request_ends_when_its_version_leaves(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, follower = await make_engine(run)
    pinned = GenerateRequest(prompt_ids=[1], sampling=LONG, policy_version=PolicyVersion(0))
    task = asyncio.create_task(engine.generate(pinned))
    await tokens_made(engine, 5)
    run.publish()

    await run.follow(engine, follower)

    with pytest.raises(VersionNotServed) as caught:
        await task
    assert caught.value.serving == 1
    assert engine.load().running == 0


async def test_a_paused_engine_takes_new_weights_in_mode_drain_without_hanging(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, follower = await make_engine(run)
    task = asyncio.create_task(engine.generate(GenerateRequest(prompt_ids=[1], sampling=LONG)))
    await tokens_made(engine, 5)
    await engine.pause()
    run.publish()

    report = await run.follow(engine, follower, mode="drain")
    await engine.resume()

    assert report.mode == "keep"
    assert [span.version for span in (await task).completions[0].spans] == [0, 1]


async def test_a_late_replica_takes_several_deltas_as_one_swap(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, follower = await make_engine(run)
    for _ in range(4):
        run.publish()

    route = follower.route(0, follower.head().version)
    staged = await engine.stage(follower.fetch(route))
    await engine.apply(staged, mode="keep")

    assert len(route) == 4 and staged.base_version == 0
    assert engine.digest == await engine.verify() == run.publisher.digest
    assert equal_weights(engine, run)


async def test_an_anchor_is_entered_over_any_weights(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, follower = await make_engine(run)
    for _ in range(3):
        run.publish()
    run.publisher.finish()
    with torch.no_grad():  # a memory fault that no running digest can see
        dict(engine.live_tensors())["model.norm.weight"][0] = float("nan")

    assert await engine.verify() != engine.digest
    head = follower.head()
    staged = await engine.stage(follower.fetch(follower.route(None, head.version)))
    await engine.apply(staged, mode="keep")

    assert await engine.verify() == engine.digest == run.publisher.digest
    assert equal_weights(engine, run)


async def test_updates_that_are_wrong_leave_the_old_version_serving(
    make_run: "MakeRun", make_engine: "MakeEngine", tmp_path: Path
) -> None:
    run = make_run()
    other = make_run(seed=9, name="other")
    engine, follower = await make_engine(run)
    run.publish()
    run.publish()
    other.publish()
    first, second = follower.fetch(follower.route(0, follower.head().version))
    strange = other.follower()
    foreign = strange.fetch(strange.route(0, strange.head().version))[0]
    digest = engine.digest

    bad: list[list[tuple[Link, Path]]] = [
        [second],  # wrong base
        [second, first],  # wrong order
        [first, first],  # replayed
        [foreign],  # another run
        [(first[0].model_copy(update={"new_digest": "0" * 32}), first[1])],  # a link that lies
    ]
    for objects in bad:
        with pytest.raises(WeightsError):
            await engine.stage(objects)
    for path in _damaged(first[1], tmp_path):
        # A bit that says nothing (a note in the header) may pass here; sha256 sees it before.
        with contextlib.suppress(WeightsError):
            staged = await engine.stage([(first[0], path)])
            assert staged.new_digest == first[0].new_digest

    assert engine.version == 0 and engine.digest == digest == await engine.verify()
    await engine.apply(await engine.stage([first, second]), mode="keep")
    assert engine.version == 2 and equal_weights(engine, run)


def _damaged(path: Path, folder: Path) -> list[Path]:
    """Copies of a file, each with one bit flipped or cut short."""
    body = path.read_bytes()
    copies = [body[: len(body) // 2], b"", body[:7]]
    for at in range(8, len(body), max(1, len(body) // 12)):
        flipped = bytearray(body)
        flipped[at] ^= 0x10
        copies.append(bytes(flipped))
    paths = [folder / f"damaged{i}.safetensors" for i in range(len(copies))]
    for target, copy in zip(paths, copies, strict=True):
        target.write_bytes(copy)
    return paths


async def test_an_update_staged_against_weights_that_moved_on_is_refused(
    make_run: "MakeRun", make_engine: "MakeEngine"
) -> None:
    run = make_run()
    engine, follower = await make_engine(run)
    run.publish()
    objects = follower.fetch(follower.route(0, follower.head().version))
    staged, doubled = await engine.stage(objects), await engine.stage(objects)
    await engine.apply(staged, mode="keep")

    with pytest.raises(EngineError):
        await engine.apply(doubled, mode="keep")

    assert engine.version == 1 and equal_weights(engine, run)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.6, 1.0]), st.integers(1, 3)), min_size=1, max_size=5
    ),
    tied=st.booleans(),
)
def test_after_any_updates_the_digest_is_the_full_one_and_the_trainers(
    make_run: "MakeRun",
    tmp_path_factory: pytest.TempPathFactory,
    moves: list[tuple[float, int]],
    tied: bool,
) -> None:
    async def play() -> None:
        run = make_run(tied=tied, name=tmp_path_factory.mktemp("r").name.lower())
        engine, follower = TorchEngine(), run.follower()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(engine.close)
            await run.start(engine, follower)
            for share, versions in moves:
                for _ in range(versions):
                    run.move(share=share)
                    run.publisher.publish(run.model.named_parameters())
                await run.follow(engine, follower)
                assert engine.digest == await engine.verify() == run.publisher.digest
                assert equal_weights(engine, run)
            layout = run.publisher.layout
            trained = digest_tensors(run.model.named_parameters(), layout)
            assert engine.digest == str(trained)

    asyncio.run(play())
