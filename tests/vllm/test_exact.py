"""A replica that was patched version by version says exactly what a fresh engine says."""

import pytest
from tiny_runs import FreshEngines, MakeReplica, MakeRun, greedy, sampled

VERSIONS = 20


@pytest.mark.parametrize(
    ("kind", "encoding"), [("untied", "seed"), ("tied", "compact"), ("moe", "compact")]
)
async def test_patched_tokens_logprobs_and_bits_equal_a_fresh_engines_at_every_version(
    make_run: MakeRun, make_replica: MakeReplica, fresh: FreshEngines, kind: str, encoding: str
) -> None:
    run = make_run(kind, encoding=encoding, keep_versions=VERSIONS)
    patched = make_replica(run)
    await patched.start()
    answers = {0: sampled(await greedy(patched.engine))}
    checkpoints = {0: run.export()}
    for _ in range(VERSIONS):
        version = run.step()
        await patched.follow()
        completions = await greedy(patched.engine)
        assert {span.version for c in completions for span in c.spans} == {version}
        assert await patched.engine.verify() == run.publisher.digest == patched.engine.digest
        answers[version] = sampled(completions)
        checkpoints[version] = run.export()
    checksums = await patched.engine.checksums()
    await patched.engine.close()

    assert len({str(answer) for answer in answers.values()}) == VERSIONS + 1
    for version, checkpoint in checkpoints.items():
        expected, expected_checksums = fresh.ask(checkpoint)
        assert answers[version] == expected, f"version {version}"
    assert checksums == expected_checksums
