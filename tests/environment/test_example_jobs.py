"""Every example job is served and played through our client: good play earns more than bad."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from deltawire.job.load import load_job
from deltawire.job.resolve import resolve
from deltawire.protocol.rollouts import Task
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.environment import EnvironmentClient
from deltawire.rollout.observation import Observation
from deltawire_environment.worlds.wordlist import load_words

JOBS = Path(__file__).resolve().parents[2] / "jobs"

Player = Callable[[Observation], str]


def last(seen: Observation) -> str:
    return seen.messages[-1]["content"]


def guesser(seen: Observation) -> str:
    letter = re.search(r"starts with (\w)", last(seen))
    assert letter
    return f"[{next(word for word in load_words().secrets['train'] if word[0] == letter[1])}]"


def adder(seen: Observation) -> str:
    numbers = re.findall(r"[-+]? ?\d+", last(seen).partition("=")[0])
    return str(sum(int(number.replace(" ", "")) for number in numbers))


def duellist(seen: Observation) -> str:
    return "4 + 5" if seen.agent == "proposer" else adder(seen)


CODE = """```python
double = lambda n: 2 * n
add = lambda a, b: a + b
largest, evens = max, lambda ns: [n for n in ns if n % 2 == 0]
backwards = lambda t: t[::-1]
vowels = lambda t: sum(c in "aeiou" for c in t)
digit_sum = lambda n: sum(map(int, str(n)))
palindrome = lambda t: t == t[::-1]
unique = lambda ns: list(dict.fromkeys(ns))
from math import gcd
from itertools import accumulate, groupby
run_lengths = lambda t: [[k, len(list(g))] for k, g in groupby(t)]
cumulative = lambda ns: list(accumulate(ns))
```"""


def halver() -> Player:
    """Binary search, as far as three tries go."""
    bounds = [1, 20]

    def guess(seen: Observation) -> str:
        middle = sum(bounds) // 2
        if "Higher" in last(seen):
            bounds[0] = middle + 1
        elif "Lower" in last(seen):
            bounds[1] = middle - 1
        return str(sum(bounds) // 2)

    return guess


def well_read(seen: Observation) -> str:
    answers = {"Norway": "Oslo", "Peru": "Lima", "Cuba": "Havana"}
    return next((a for country, a in answers.items() if country in last(seen)), "Paris")


GOOD: dict[str, Callable[[], Player]] = {
    "duel": lambda: duellist,
    "guess": lambda: guesser,
    "own_world": halver,
    "python_code": lambda: lambda seen: CODE,
    "questions": lambda: well_read,
    "sums": lambda: adder,
}


async def play(client: EnvironmentClient, seed: int, turns: int, player: Player) -> float:
    deadline = Deadline.after(60)
    session, seen = await client.start(Task(seed=seed), deadline=deadline)
    total = 0.0
    async with session:
        for _ in range(turns):
            seen = await session.step(player(seen), deadline=deadline)
            assert seen.status == "ok", seen.reason
            total += seen.reward or 0.0
            if seen.done:
                return total
    raise AssertionError(f"not over after {turns} turns")


@pytest.mark.parametrize("name", sorted(path.stem for path in JOBS.glob("*.py")))
async def test_good_play_of_an_example_job_earns_more_than_bad(
    serve_environment, name: str
) -> None:
    job = load_job(JOBS / f"{name}.py")
    turns = resolve(job).spec.env.max_turns
    async with serve_environment(job=job) as running:
        client = EnvironmentClient(running.url)
        good = [await play(client, seed, turns, GOOD[name]()) for seed in range(4)]
        bad = [await play(client, seed, turns, lambda seen: "I do not know.") for seed in range(4)]
    assert sum(good) > sum(bad)
    assert min(good) >= min(bad)


async def test_a_proposer_that_says_nonsense_leaves_the_solver_something_to_solve(
    serve_environment,
) -> None:
    async with serve_environment(job=load_job(JOBS / "duel.py")) as running:
        deadline = Deadline.after(60)
        asked = set()
        for nonsense in ("I do not know.", "99 + 99", ""):
            session, _ = await EnvironmentClient(running.url).start(Task(seed=5), deadline=deadline)
            async with session:
                seen = await session.step(nonsense, deadline=deadline)
                assert seen.agent == "solver"
                asked.add(last(seen))
                end = await session.step(adder(seen), deadline=deadline)
            assert end.agent_rewards == {"solver": 1.0, "proposer": 0.0}
        assert len(asked) == 1, "one group, one spare sum"
