"""Swaps under load: nothing fails, spans tell the truth, and a bad update changes nothing."""

import asyncio

import pytest
from tiny_runs import PROMPTS, MakeReplica, MakeRun, Replica, TinyRun, greedy, sampled

from deltawire.protocol.errors import DeltawireError, DigestMismatch, EngineError, VersionNotServed
from deltawire.protocol.generation import Completion, GenerateRequest, Sampling
from deltawire_inference.engines.base import SwapMode

MODES: tuple[SwapMode, ...] = ("keep", "keep_kv", "drain", "abort")
SWAPS = 10
CONCURRENT = 32
LONG = Sampling(temperature=0.0, max_new_tokens=400, ignore_eos=True)


async def complete(replica: Replica, prompt: list[int], tokens: int) -> list[Completion]:
    """Generate all tokens, resubmitting with the prefix after an abort."""
    parts: list[Completion] = []
    made: list[int] = []
    while len(made) < tokens:
        sampling = Sampling(
            temperature=1.0, max_new_tokens=tokens - len(made), ignore_eos=True, seed=len(made)
        )
        request = GenerateRequest(prompt_ids=prompt + made, sampling=sampling)
        (part,) = (await replica.engine.generate(request)).completions
        parts.append(part)
        made += part.token_ids
    return parts


async def keep_busy(replica: Replica, stop: asyncio.Event) -> list[list[Completion]]:
    """One client: request after request until told to stop."""
    done = []
    while not stop.is_set():
        done.append(await complete(replica, PROMPTS[len(done) % 4], tokens=24))
    return done


async def swap_under_load(replica: Replica, run: TinyRun, mode: SwapMode) -> list[Completion]:
    """`SWAPS` versions, `CONCURRENT` requests in flight throughout."""
    stop = asyncio.Event()
    clients = [asyncio.create_task(keep_busy(replica, stop)) for _ in range(CONCURRENT)]
    for _ in range(SWAPS):
        await asyncio.sleep(0.2)
        await asyncio.to_thread(run.step)
        await replica.follow(mode)
    stop.set()
    finished = await asyncio.gather(*clients)
    return [part for client in finished for parts in client for part in parts]


async def test_no_request_fails_across_ten_swaps_in_each_mode(
    make_run: MakeRun, make_replica: MakeReplica
) -> None:
    run = make_run("untied", encoding="compact")
    replica = make_replica(run)
    await replica.start()

    for mode in MODES:
        before = replica.engine.version
        parts = await swap_under_load(replica, run, mode)

        assert replica.engine.version == before + SWAPS
        aborted = [part for part in parts if part.finish_reason == "abort"]
        mixed = [part for part in parts if len(part.spans) > 1]
        assert bool(aborted) == (mode == "abort"), mode
        assert bool(mixed) == mode.startswith("keep"), mode
        assert {s.version for p in parts for s in p.spans} <= set(range(before, before + SWAPS + 1))
        assert await replica.engine.verify() == run.publisher.digest

    await bad_updates_leave_everything_as_it_was(run, replica)
    await kept_tokens_continue_as_a_fresh_prefill(run, replica)


async def bad_updates_leave_everything_as_it_was(run: TinyRun, replica: Replica) -> None:
    engine = replica.engine
    before = sampled(await greedy(engine))
    head = replica.follower.head()
    old_route = replica.follower.fetch([link for link in head.links if link.kind == "delta"][-1:])
    with pytest.raises(DigestMismatch):
        await engine.stage(old_route)  # applied already

    run.step()
    new_head = replica.follower.head()
    (pair,) = replica.follower.fetch(replica.follower.route(engine.version, new_head.version))
    torn = pair[1].with_name("torn.safetensors")
    torn.write_bytes(pair[1].read_bytes()[:-7])
    with pytest.raises(DeltawireError):
        await engine.stage([(pair[0], torn)])

    staged_twice = [await engine.stage([pair]), await engine.stage([pair])]
    await engine.apply(staged_twice[0], mode="keep")
    with pytest.raises(DigestMismatch):
        await engine.apply(staged_twice[1], mode="keep")

    assert engine.version == new_head.version
    assert await engine.verify() == run.publisher.digest
    assert sampled(await greedy(engine)) != before
    with pytest.raises(VersionNotServed):
        await engine.generate(GenerateRequest(prompt_ids=[5], policy_version=new_head.version - 1))
    with pytest.raises(EngineError):
        await engine.load_adapter("none", pair[1])


async def kept_tokens_continue_as_a_fresh_prefill(run: TinyRun, replica: Replica) -> None:
    """Mode keep drops all keys and values: what follows equals a prompt of the tokens so far."""
    kept = await completion_across_a_swap(run, replica)
    swap = kept.spans[1].start
    rest = GenerateRequest(
        prompt_ids=PROMPTS[0] + kept.token_ids[:swap],
        sampling=LONG.model_copy(update={"max_new_tokens": LONG.max_new_tokens - swap}),
    )
    (fresh,) = (await replica.engine.generate(rest)).completions

    assert kept.token_ids[swap:] == fresh.token_ids


async def completion_across_a_swap(run: TinyRun, replica: Replica) -> Completion:
    """How soon the first token comes is the machine's: the swap is tried at several moments."""
    for wait_s in (0.5, 0.2, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0):
        request = GenerateRequest(prompt_ids=PROMPTS[0], sampling=LONG)
        running = asyncio.create_task(replica.engine.generate(request))
        await asyncio.sleep(wait_s)
        run.step()
        await replica.follow("keep")
        (kept,) = (await running).completions
        if len(kept.spans) == 2:
            return kept
    raise AssertionError("no completion was running at any swap")
