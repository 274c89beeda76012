"""Hostile programs are contained, and the sandboxes stay healthy after each."""

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from deltawire.protocol.errors import EpisodeFailed
from deltawire_environment.sandbox import seccomp
from deltawire_environment.sandbox.forks import Forks
from deltawire_environment.sandbox.pool import Call, Program, SandboxPool

from . import hostile

MODES = ["private", "closed"]

TRIPLE = Program(
    code="def triple(n):\n    return 3 * n\n", calls=[Call(function="triple", arguments=[7])]
)


@pytest.fixture(params=MODES)
async def sandboxes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DELTAWIRE_TEST_SECRET", hostile.SECRET_MARK)
    pool = SandboxPool(limit=4, mode=request.param, cpu_s=1)
    yield pool
    pool.close()


async def what_went_wrong(sandboxes: SandboxPool, source: str) -> str:
    """Run a hostile program and then an honest one: how the first got out, or ""."""
    outcome = await asyncio.wait_for(sandboxes.run(Program(code=source, wall_s=4.0)), 60)
    after = await sandboxes.run(TRIPLE)
    if outcome.status == "ok":
        return f"it ran to its end: {outcome.output[:200]!r}"
    if hostile.SECRET_MARK in outcome.output or "root:" in outcome.output:
        return f"it read what it must not: {outcome.output[:200]!r}"
    if len(outcome.output) > 64 * 1024:
        return f"it printed {len(outcome.output)} characters"
    return "" if after.results == [{"value": 21}] else f"the next program found {after}"


async def test_hostile_programs_are_contained_and_the_pool_works_on(
    sandboxes: SandboxPool,
) -> None:
    await sandboxes.run(TRIPLE)
    processes = len(psutil.Process().children(recursive=True))
    found = await asyncio.gather(
        *(what_went_wrong(sandboxes, source) for source in hostile.PROGRAMS.values())
    )
    escaped = {name: how for name, how in zip(hostile.PROGRAMS, found, strict=True) if how}
    assert len(hostile.PROGRAMS) >= 25
    assert escaped == {}
    assert len(psutil.Process().children(recursive=True)) == processes
    assert not any(map(os.path.exists, ("/evil", "/usr/evil", "/tmp/etc")))


async def test_a_scratch_folder_is_private_and_gone_with_its_program(
    sandboxes: SandboxPool,
) -> None:
    await sandboxes.run(TRIPLE)
    if not sandboxes.private:
        pytest.skip("no namespaces: programs cannot open files at all")
    write = "open('left-behind', 'w').write('x')\nimport os\nprint(os.listdir('.'))"
    assert (await sandboxes.run(Program(code=write))).output == "['left-behind']\n"
    look = await sandboxes.run(Program(code="import os\nprint(os.listdir('/tmp'))"))
    assert look.output == "[]\n"
    assert not os.path.exists("/tmp/left-behind")  # noqa: ASYNC240 - once, in a test


async def test_results_come_back_in_order_with_errors_in_their_places(
    sandboxes: SandboxPool,
) -> None:
    code = (
        "def half(n):\n    if n % 2: raise ValueError('odd')\n    return n // 2\n"
        "def odd(n): return {n}"
    )
    calls = [Call(function="half", arguments=[n]) for n in (4, 5, 6)]
    calls += [Call(function="odd", arguments=[1]), Call(function="none", arguments=[])]
    outcome = await sandboxes.run(Program(code=code, calls=calls))
    values = [answer.get("value", str(answer.get("error"))[:12]) for answer in outcome.results]
    assert values == [2, "ValueError: ", 3, "the result i", "no function "]


async def test_a_dead_server_is_started_again(sandboxes: SandboxPool) -> None:
    await sandboxes.run(TRIPLE)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    outcomes = [(await sandboxes.run(TRIPLE)).status for _ in range(3)]
    assert outcomes[-1] == "ok"


async def test_a_server_that_does_not_start_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(EpisodeFailed, match="did not start"):
        await Forks.start(mode="closed", memory_bytes=2**24, cpu_s=1)
    assert os.listdir(tmp_path) == []


async def test_one_sandbox_is_kept_warm_for_every_running_episode(sandboxes: SandboxPool) -> None:
    for _ in range(3):
        await sandboxes.expect()
    assert sandboxes.warm == 3
    await asyncio.gather(*(sandboxes.run(TRIPLE) for _ in range(8)))
    assert sandboxes.warm == 3
    for _ in range(9):
        await sandboxes.expect()
    assert sandboxes.warm == sandboxes.limit


async def test_no_more_programs_run_at_a_time_than_the_limit(sandboxes: SandboxPool) -> None:
    code = "import time\nprint(time.monotonic())\ntime.sleep(0.3)\nprint(time.monotonic())"
    outcomes = await asyncio.gather(*(sandboxes.run(Program(code=code)) for _ in range(9)))
    spans = [tuple(map(float, outcome.output.split())) for outcome in outcomes]
    for begin, _ in spans:
        assert sum(other_begin <= begin < other_end for other_begin, other_end in spans) <= 4


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("files", [True, False])
def test_the_filter_ends_every_path_in_a_return(machine: str, files: bool) -> None:
    code = seccomp.program(files=files, machine=machine)
    steps = [code[at : at + 8] for at in range(0, len(code), 8)]
    assert len(steps) < 4096
    assert steps[-1][0] == 0x06
    for at, step in enumerate(steps):
        if step[0] == 0x15:
            assert at + 1 + max(step[2], step[3]) < len(steps)
