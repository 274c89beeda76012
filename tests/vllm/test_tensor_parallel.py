"""Two ranks, one staged update each: the same words as a fresh pair of ranks."""

from tiny_runs import MakeReplica, MakeRun, greedy, sampled

TWO_RANKS = ("--tensor-parallel-size", "2")


async def test_two_ranks_follow_deltas_and_an_anchor_exactly(
    make_run: MakeRun, make_replica: MakeReplica
) -> None:
    run = make_run("untied", encoding="compact")
    patched = make_replica(run, arguments=TWO_RANKS)
    await patched.start()
    for _ in range(3):
        run.step()
        await patched.follow()
        assert await patched.engine.verify() == run.publisher.digest
    run.step()
    run.step()
    running = patched.engine._running
    assert running.swap == running.client.swap  # our own route is there
    running.swap = running.client.swap_by_parts  # as on a vLLM without endpoint plugins
    await patched.follow()  # two deltas as one update
    run.step(share=0.9)
    run.publisher.finish()  # an anchor of the newest version
    head = patched.follower.head()
    anchors = [link for link in head.links if link.kind == "anchor"]
    staged = await patched.engine.stage(patched.follower.fetch(anchors[-1:]))
    await patched.engine.apply(staged, mode="drain")
    assert await patched.engine.verify() == run.publisher.digest
    answers = sampled(await greedy(patched.engine))
    await patched.engine.close()

    fresh = make_replica(run, arguments=TWO_RANKS)
    await fresh.start()
    assert sampled(await greedy(fresh.engine)) == answers
