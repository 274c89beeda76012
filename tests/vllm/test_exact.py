"""A replica that was patched version by version says exactly what a fresh one says."""

import os

import pytest
from tiny_runs import MakeReplica, MakeRun, greedy, sampled

VERSIONS = 20
EVERY = "DELTAWIRE_VLLM_EVERY_VERSION"
"""Set, every version is compared with a fresh server (half an hour); else the middle and last."""


@pytest.mark.parametrize(
    ("kind", "encoding"), [("untied", "seed"), ("tied", "compact"), ("moe", "compact")]
)
async def test_patched_tokens_logprobs_and_bits_equal_a_fresh_servers(
    make_run: MakeRun, make_replica: MakeReplica, kind: str, encoding: str
) -> None:
    run = make_run(kind, encoding=encoding, keep_versions=VERSIONS)
    patched = make_replica(run)
    await patched.start()
    answers = {0: sampled(await greedy(patched.engine))}
    for _ in range(VERSIONS):
        version = run.step()
        await patched.follow()
        completions = await greedy(patched.engine)
        assert {span.version for c in completions for span in c.spans} == {version}
        assert await patched.engine.verify() == run.publisher.digest == patched.engine.digest
        answers[version] = sampled(completions)
    checksums = await patched.engine.checksums()
    await patched.engine.close()

    assert len({str(answer) for answer in answers.values()}) == VERSIONS + 1
    compared = range(1, VERSIONS + 1) if os.environ.get(EVERY) else (VERSIONS // 2, VERSIONS)
    fresh = make_replica(run)
    for version in compared:
        await fresh.start(version)
        assert sampled(await greedy(fresh.engine)) == answers[version], f"version {version}"
    assert await fresh.engine.checksums() == checksums
