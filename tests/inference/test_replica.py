"""A replica follows its bucket: by notice, by poll, past bad objects, and back from broken."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from deltawire.protocol.control import ReplicaStatus, WeightNotice
from deltawire.protocol.errors import InvalidKey, ReplicaBroken
from deltawire.protocol.generation import GenerateRequest, GenerateResponse, Sampling
from deltawire.protocol.layout import in_run
from deltawire_inference.engines.base import SwapMode

if TYPE_CHECKING:
    from tests.inference.conftest import MakeRun, Serving, TinyRun

Serve = Callable[..., AbstractAsyncContextManager["Serving"]]
SHORT = Sampling(max_new_tokens=8, ignore_eos=True)


def notice(run: "TinyRun", number: int, **fields: object) -> dict[str, object]:
    """What the trainer sends."""
    key = f"deltas/step_{number:06d}.safetensors"
    return {"repo_id": run.store.uri, "filename": in_run(run.run_id, key), **fields}


def flip(run: "TinyRun", key: str, *, at: int = -9) -> None:
    """Damage an object that lies in the bucket."""
    path = Path(run.store.uri.removeprefix("file://")) / run.run_id / key
    body = bytearray(path.read_bytes())
    body[at] ^= 0x40
    path.write_bytes(bytes(body))


async def status(serving: "Serving") -> ReplicaStatus:
    """As anyone sees it."""
    async with serving.http_client() as client:
        return ReplicaStatus.model_validate_json((await client.get("/status")).content)


async def until(serving: "Serving", holds: Callable[[], bool]) -> None:
    """Let the replica go on until something holds."""
    while not holds():  # noqa: ASYNC110 - the replica tells nobody
        await asyncio.sleep(0.01)


def same_bits(serving: "Serving", run: "TinyRun") -> bool:
    """Whether what is served is what the trainer published, bit by bit."""
    live = dict(serving.engine.live_tensors())
    return all(
        torch.equal(live[name].view(torch.int16), tensor.detach().view(torch.int16))
        for name, tensor in run.model.named_parameters()
    )


async def test_a_replica_waits_for_its_run_and_then_joins(
    make_run: "MakeRun", serve: Serve, tmp_path: Path
) -> None:
    store = (tmp_path / "tiny" / "bucket").as_uri()
    async with serve(None, joined=False, store=store, run_id="tiny") as serving:
        async with serving.http_client() as client:
            await until(serving, lambda: bool(serving.replica.last_error))
            early = await client.get("/readyz")
            refused = await client.post("/v1/generate", json={"prompt_ids": [1]})
            assert early.status_code == refused.status_code == 503
            assert "joining" in early.json()["reason"]

            run = make_run()
            run.publish()
            await serving.serves(run.publisher.version)

            assert (await client.get("/readyz")).status_code == 200
        now = await status(serving)
        assert now.digest == run.publisher.digest and now.updates[0].base_version is None


async def test_a_notice_brings_the_new_version_at_once_and_doubled_ones_do_no_harm(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run()
    async with serve(run, poll_s=3600) as serving, serving.http_client() as client:
        run.publish()

        for _ in range(3):
            answer = await client.post("/update_weights", json=notice(run, 1, version=1))
            assert answer.status_code == 202 and answer.json()["accepted"]
        await serving.serves(1)

        now = await status(serving)
        assert (now.updates_total, now.version, now.lag) == (2, 1, 0)
        update = now.updates[-1]
        assert (update.kind, update.base_version) == ("delta", 0)
        assert update.pause_ms > 0 and update.changed > 0 and update.bytes > 0
        assert (update.mode, update.recomputed_tokens) == ("keep", 0)


async def test_a_notice_that_comes_before_latest_json_is_followed_up(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run()
    async with serve(run, poll_s=3600) as serving, serving.http_client() as client:
        await client.post("/update_weights", json=notice(run, 1, version=1))
        await until(serving, lambda: serving.replica.head_version == 0)
        run.publish()

        await serving.serves(1)


@pytest.mark.parametrize(
    ("repo_id", "filename"),
    [
        ("file:///etc", None),
        ("hf://buckets/someone/else", None),
        ("https://evil.example/x", None),
        (None, "other/deltas/step_000001.safetensors"),
        (None, "tiny/../other/deltas/step_000001.safetensors"),
        (None, "tiny/deltas/../../../../etc/passwd"),
        (None, "/etc/passwd"),
        (None, "tiny/latest.json"),
        (None, "tiny/deltas/step_000001.pt"),
    ],
)
async def test_a_notice_about_anything_else_is_refused(
    make_run: "MakeRun", serve: Serve, repo_id: str | None, filename: str | None
) -> None:
    run = make_run()
    async with serve(run, poll_s=3600) as serving, serving.http_client() as client:
        body = notice(run, 1)
        body |= {"repo_id": repo_id} if repo_id else {}
        body |= {"filename": filename} if filename else {}
        run.publish()

        answer = await client.post("/update_weights", json=body)

        assert answer.status_code == 400 and answer.json()["type"] == InvalidKey.__name__
        assert serving.engine.version == 0


async def test_without_any_notice_the_poll_finds_new_versions(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run()
    async with serve(run) as serving:
        for version in (1, 2, 3):
            run.publish()
            await serving.serves(version)

        assert serving.engine.digest == run.publisher.digest == await serving.engine.verify()


async def test_a_damaged_object_is_refused_remembered_and_passed_by_an_anchor(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run()
    async with serve(run) as serving:
        run.publish()
        await serving.serves(1)
        old = serving.replica.follower.head
        serving.replica.follower.head = lambda: (_ for _ in ()).throw(  # type: ignore[method-assign]
            InvalidKey("held back")
        )
        run.publish()
        flip(run, "deltas/step_000002.safetensors")
        serving.replica.follower.head = old  # type: ignore[method-assign]

        await until(serving, lambda: serving.replica.routing.rejected_total == 1)
        answer = await serving.replica.generate(GenerateRequest(prompt_ids=[1], sampling=SHORT))

        assert answer.completions[0].spans[0].version == 1
        assert serving.engine.version == 1 and serving.replica.state == "serving"
        run.publish()
        run.publisher.finish()
        await serving.serves(3)
        assert serving.engine.digest == run.publisher.digest == await serving.engine.verify()
        assert serving.replica.routing.rejected_total == 1


async def test_a_delta_that_lies_about_its_digest_is_refused_and_what_comes_before_it_applied(
    make_run: "MakeRun", make_engine: object, serve: Serve
) -> None:
    run = make_run()
    for _ in range(3):
        run.publish()
    async with serve(run, joined=False) as serving:
        real = serving.replica.follower.head

        def lying() -> object:
            head = real()
            links = [
                link.model_copy(update={"new_digest": "f" * 32}) if link.version == 2 else link
                for link in head.links
            ]
            return head.model_copy(update={"links": links})

        serving.replica.follower.head = lying  # type: ignore[method-assign,assignment]
        await until(serving, lambda: serving.replica.routing.rejected_total > 0)

        await serving.serves(1)
        assert await serving.engine.verify() == serving.engine.digest


async def test_weights_that_went_wrong_in_memory_are_never_served_again(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run()
    async with serve(run, verify_s=0.01) as serving:
        run.publish()
        await serving.serves(1)
        with torch.no_grad():
            dict(serving.engine.live_tensors())["model.norm.weight"][3] = 9.0

        await until(serving, lambda: "live weights" in serving.replica.last_error)
        await serving.serves(1)

        assert await serving.engine.verify() == serving.engine.digest == run.publisher.digest
        assert serving.replica.history.newest[-1].base_version is None


async def test_a_broken_replica_generates_nothing(make_run: "MakeRun", serve: Serve) -> None:
    run = make_run()
    async with serve(run, poll_s=3600) as serving, serving.http_client() as client:
        await serving.engine.close()

        with pytest.raises(ReplicaBroken):
            await serving.replica.generate(GenerateRequest(prompt_ids=[1]))
        answer = await client.post("/v1/generate", json={"prompt_ids": [1]})
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"


async def test_what_was_sampled_from_weights_that_turned_out_wrong_is_not_handed_out(
    make_run: "MakeRun", serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts ask the replica itself, past the routes, and closing an engine takes its time."""
    async with serve(make_run(), poll_s=3600) as serving:
        replica, request = serving.replica, GenerateRequest(prompt_ids=[1], sampling=SHORT)
        sampled = await replica.generate(request)

        async def sample(request: GenerateRequest) -> GenerateResponse:
            replica.state = "broken"
            return sampled

        monkeypatch.setattr(serving.engine, "generate", sample)
        with pytest.raises(ReplicaBroken):
            await replica.generate(request)
        with pytest.raises(ReplicaBroken, match="no trusted weights are loaded: broken"):
            await anext(replica.stream(request))


@pytest.mark.parametrize("mode", ["keep", "keep_kv", "drain", "abort"])
async def test_under_32_requests_ten_swaps_fail_none(
    make_run: "MakeRun", serve: Serve, mode: SwapMode
) -> None:
    run = make_run()
    async with serve(run, swap_mode=mode) as serving, serving.http_client() as client:
        over = asyncio.Event()

        async def ask(number: int) -> list[GenerateResponse]:
            answers = []
            while not over.is_set():
                wanted = GenerateRequest(
                    prompt_ids=[number, 2, 3],
                    sampling=Sampling(max_new_tokens=24, ignore_eos=True),
                    session=str(number),
                )
                answer = await client.post("/v1/generate", json=wanted.model_dump())
                assert answer.status_code == 200, answer.text
                answers.append(GenerateResponse.model_validate_json(answer.content))
            return answers

        callers = [asyncio.create_task(ask(number)) for number in range(32)]
        for version in range(1, 11):
            run.publish()
            await serving.serves(version)
        over.set()
        answers = [answer for caller in callers for answer in await caller]

        assert serving.engine.digest == run.publisher.digest == await serving.engine.verify()
        versions = {s.version for a in answers for s in a.completions[0].spans}
        assert len(versions) > 3 and versions <= set(range(11))
        whole = [a for a in answers if a.completions[0].finish_reason == "length"]
        assert all(len(a.completions[0].token_ids) == 24 for a in whole)
        assert (len(whole) == len(answers)) or mode == "abort"
        assert {answer.replica_id for answer in answers} == {"replica-1"}


async def test_a_pinned_version_that_is_not_served_is_a_conflict(
    make_run: "MakeRun", serve: Serve
) -> None:
    async with serve(make_run()) as serving, serving.http_client() as client:
        answer = await client.post("/v1/generate", json={"prompt_ids": [1], "policy_version": 3})

        assert answer.status_code == 409 and answer.headers["Retry-After"] == "1"
        assert answer.json()["type"] == "VersionNotServed"


async def test_only_health_is_open(make_run: "MakeRun", serve: Serve) -> None:
    async with serve(make_run()) as serving, serving.http_client(token="no") as client:
        for path in ("/status", "/metrics", "/v1/models", "/docs"):
            assert (await client.get(path)).status_code == 401, path
        for path in (
            "/v1/generate",
            "/v1/completions",
            "/v1/chat/completions",
            "/update_weights",
            "/pause",
            "/resume",
            "/rollouts",
        ):
            assert (await client.post(path, json={})).status_code == 401, path
        assert (await client.get("/healthz")).status_code == 200


async def test_a_draining_replica_takes_no_new_work(make_run: "MakeRun", serve: Serve) -> None:
    async with serve(make_run()) as serving, serving.http_client() as client:
        running = asyncio.create_task(
            client.post(
                "/v1/generate",
                json={
                    "prompt_ids": [1],
                    "sampling": {"max_new_tokens": 200, "ignore_eos": True},
                },
            )
        )
        await until(serving, lambda: serving.engine.load().running > 0)

        await serving.service.drain()

        assert (await client.get("/readyz")).json()["reason"].startswith("draining")
        refused = await client.post("/v1/generate", json={"prompt_ids": [1]})
        assert refused.status_code == 503 and "another" in refused.json()["detail"]
        assert (await running).status_code == 200


async def test_pause_holds_tokens_back_and_resume_lets_them_go(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run()
    async with serve(run) as serving, serving.http_client() as client:
        assert (await client.post("/pause")).json() == {"paused": True}
        waiting = asyncio.create_task(
            client.post("/v1/generate", json={"prompt_ids": [1], "sampling": {"seed": 1}})
        )
        run.publish()
        await serving.serves(1)
        assert serving.engine.load().tokens_total == 0

        assert (await client.post("/resume")).json() == {"paused": False}
        answer = GenerateResponse.model_validate_json((await waiting).content)
        assert {span.version for span in answer.completions[0].spans} == {1}


async def test_a_body_over_the_limit_is_refused(make_run: "MakeRun", serve: Serve) -> None:
    async with serve(make_run(), body_bytes=1000) as serving, serving.http_client() as client:
        answer = await client.post("/v1/generate", json={"prompt_ids": [1] * 2000})

        assert answer.status_code == 413 and answer.json()["type"] == "PayloadTooLarge"


async def test_a_replica_joins_and_rebases_from_an_anchor_in_shards(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run(anchor_shard_bytes=30_000)
    assert len(run.publisher.head.links[0].shards) > 2
    async with serve(run, poll_s=3600) as serving:
        assert same_bits(serving, run)

        run.publish()
        flip(run, "deltas/step_000001.safetensors")
        run.publisher.finish()  # an anchor of version 1 leads past the damaged delta
        hint = WeightNotice.model_validate(notice(run, 1, version=1))
        while serving.engine.version != 1:
            serving.replica.notice(hint)
            await asyncio.sleep(0.01)

        now = await status(serving)
        assert (now.updates[-1].kind, now.updates[-1].base_version) == ("anchor", 0)
        assert same_bits(serving, run) and now.digest == run.publisher.digest


async def test_nothing_is_served_from_an_anchor_with_a_bad_shard(
    make_run: "MakeRun", serve: Serve
) -> None:
    run = make_run(anchor_shard_bytes=30_000)
    flip(run, run.publisher.head.links[0].shards[1].key)
    async with serve(run, joined=False) as serving:
        await until(serving, lambda: serving.replica.routing.rejected_total == 1)

        assert serving.engine.version is None and serving.replica.state == "joining"
        run.publish()
        run.publisher.finish()
        await serving.serves(1)

        assert same_bits(serving, run)


@pytest.mark.parametrize(("told", "expected"), [(None, "abort"), ("keep_kv", "keep_kv")])
async def test_swaps_follow_the_job_unless_this_replica_is_told_otherwise(
    make_run: "MakeRun", serve: Serve, told: str | None, expected: str
) -> None:
    run = make_run(swap_mode="abort")
    async with serve(run, swap_mode=told) as serving:
        run.publish()
        await serving.serves(1)

        now = await status(serving)
        assert (now.swap_mode, now.updates[-1].mode) == (expected, expected)
