"""The other built-in worlds, each played as a session would."""

import inspect
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.job.registry import installed_worlds, make_world
from deltawire.job.world import Episode, Reply, World
from deltawire.protocol.errors import JobError
from deltawire.protocol.rollouts import Task
from deltawire.service.metrics import Metrics
from deltawire_environment.worlds.arithmetic import result_of
from deltawire_environment.worlds.code import CodeConfig, CodeWorld, code_in
from deltawire_environment.worlds.problems import equal, make_problem
from deltawire_environment.worlds.reasoning import answer_in


async def started(world: World, seed: int = 0, **row: object) -> tuple[Episode, Reply]:
    begun = world.start(Task(seed=seed, row=row), random.Random(seed))
    return await begun if inspect.isawaitable(begun) else begun


async def stepped(episode: Episode, message: str) -> Reply:
    reply = episode.step({"message": message})
    return await reply if inspect.isawaitable(reply) else reply


async def play(world: World, *messages: str, seed: int = 0) -> Reply:
    episode, reply = await started(world, seed)
    for message in messages:
        reply = await stepped(episode, message)
    return reply


def test_every_built_in_world_can_be_found_by_its_name() -> None:
    names = {"arithmetic", "code", "guess", "letters", "reasoning", "stop_early", "tools"}
    assert names <= set(installed_worlds())


def test_an_unknown_world_or_argument_gets_a_suggestion() -> None:
    with pytest.raises(JobError, match="did you mean 'arithmetic'"):
        make_world("arithmetics", {})
    with pytest.raises(JobError, match="takes no argument 'larges'; did you mean 'largest'"):
        make_world("arithmetic", {"larges": 3})
    with pytest.raises(JobError, match="smallest=9 is above largest=3"):
        make_world("arithmetic", {"smallest": 9, "largest": 3})


@given(st.integers(0, 500))
async def test_a_right_sum_is_worth_one_and_a_near_one_less(seed: int) -> None:
    world = make_world("arithmetic", {"operations": ["+", "-", "*"], "terms": 3})
    _, first = await started(world, seed)
    answer = eval(first.messages[-1]["content"].removesuffix("="))
    assert (await play(world, f" {answer} ", seed=seed)).reward == 1.0
    assert (await play(world, f"It is {answer}.", seed=seed)).reward == 0.5
    near = (await play(world, str(answer + 1), seed=seed)).reward
    far = (await play(world, str(answer + 50), seed=seed)).reward
    assert near is not None
    assert far is not None
    assert 0.0 < far < near < 0.5


def test_products_come_before_sums() -> None:
    assert result_of([2, 3, 4], ["+", "*"]) == 14
    assert result_of([2, 3, 4], ["*", "-"]) == 2


@pytest.mark.parametrize("message", ["", "9" * 5000, "- -", "one", "1 2"])
async def test_no_number_is_worth_nothing(message: str) -> None:
    reply = await play(make_world("arithmetic", {}), message)
    assert reply.done
    assert reply.reward is not None
    assert 0.0 <= reply.reward < 0.01


async def test_letters_reward_the_share_and_score_each_character() -> None:
    world = make_world("letters", {"alphabet": "a", "length": 4})
    reply = await play(world, "aabaxxx")
    assert reply.reward == 0.75
    assert reply.span_rewards == [(0, 1, 1.0), (1, 2, 1.0), (2, 3, 0.0), (3, 4, 1.0)]


async def test_stopping_early_pays() -> None:
    world = make_world("stop_early", {"longest": 10})
    rewards = [(await play(world, "x" * length)).reward for length in (0, 5, 10, 20)]
    assert rewards == [1.0, 0.5, 0.0, 0.0]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_the_tool_world_is_won_by_asking_and_paying() -> None:
    world = make_world("tools", {"items": 2})
    episode, first = await started(world)
    assert '"name": "price"' in first.messages[0]["content"]
    wanted = first.messages[1]["content"].partition(": ")[2].partition("?")[0].split(", ")
    asked = await stepped(episode, "".join(call("price", item=item) for item in wanted))
    prices = [int(message["content"]) for message in asked.messages]
    assert [message["role"] for message in asked.messages] == ["tool", "tool"]
    paid = await stepped(episode, call("pay", total=sum(prices)))
    assert paid.messages[0]["content"] == "Thank you."
    end = await stepped(episode, "Done.")
    assert end.done
    assert end.reward == 1.0


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (call("steal", item="apple"), "no tool 'steal'"),
        (call("price", item="moon"), "we do not sell 'moon'"),
        (call("pay", total="much"), "argument total"),
        (call("_right"), "no tool '_right'"),
        (call("get_reward"), "no tool 'get_reward'"),
        ("<tool_call>{nonsense}</tool_call>", "not JSON"),
    ],
)
async def test_a_wrong_call_is_told_to_the_policy(message: str, complaint: str) -> None:
    reply = await play(make_world("tools", {}), message)
    assert not reply.done
    assert complaint in reply.messages[0]["content"]
    assert reply.metrics["tool_errors"] == 1.0


async def test_the_tool_world_ends_at_its_turn_limit_with_its_own_reward() -> None:
    reply = await play(make_world("tools", {"max_turns": 2}), *[call("pay", total=0)] * 2)
    assert reply.done
    assert reply.reward == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 7 </answer>", "7"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("7", None),
        ("<answer>7", None),
        ("</answer>7<answer>", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert answer_in(text) == answer


async def test_reasoning_needs_its_package_or_uses_it() -> None:
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        with pytest.raises(JobError, match=r"deltawire-environment\[reasoning\]"):
            make_world("reasoning:leg_counting", {})
        return
    assert reasoning_gym
    world = make_world("reasoning:leg_counting", {"size": 20})
    episode, first = await started(world)
    same, second = await started(world)
    assert first.messages == second.messages
    gold = (await stepped(episode, "no idea")).info["answer"]
    assert (await stepped(same, f"<answer>{gold}</answer>")).reward == 1.0
    with pytest.raises(JobError, match="did you mean"):
        make_world("reasoning:leg_countin", {})


SOLUTIONS = """
def double(n): return 2 * n
def add(a, b): return a + b
def largest(numbers): return max(numbers)
def backwards(text): return text[::-1]
def vowels(text): return sum(c in "aeiou" for c in text)
def digit_sum(n): return sum(int(c) for c in str(n))
def evens(numbers): return [n for n in numbers if not n % 2]
def palindrome(text): return text == text[::-1]
def unique(numbers): return sorted(set(numbers), key=numbers.index)
def gcd(a, b):
    import math
    return math.gcd(a, b)
def run_lengths(text):
    import itertools
    return [[k, len(list(g))] for k, g in itertools.groupby(text)]
def cumulative(numbers):
    import itertools
    return list(itertools.accumulate(numbers))
"""


@pytest.fixture
async def code_world():
    world = CodeWorld(CodeConfig(max_turns=2, tests=4, partial=True))
    yield world
    world.close()


async def test_right_programs_pass_whatever_problem_a_seed_draws(code_world: CodeWorld) -> None:
    drawn = set()
    for seed in range(24):
        drawn.add(make_problem(random.Random(seed), tests=1).function)
        reply = await play(code_world, f"Here:\n```python\n{SOLUTIONS}\n```", seed=seed)
        assert reply.done
        assert reply.reward == 1.0, seed
    assert len(drawn) >= 8


async def test_a_failed_try_is_explained_without_the_answer_and_the_second_may_win(
    code_world: CodeWorld,
) -> None:
    row = {
        "function": "add",
        "prompt": "Add.",
        "tests": [{"args": [1, 2], "expect": 3}, {"args": [40, 2], "expect": 42}],
    }
    episode, _ = await started(code_world, **row)
    first = await stepped(episode, "def add(a, b): return 3")
    assert not first.done
    assert first.turn_reward == 0.5
    assert "1 of 2 tests passed; add(40, 2) is wrong" in first.text
    assert "42" not in first.text
    second = await stepped(episode, "def add(a, b): return a + b")
    assert (second.done, second.reward) == (True, 1.0)


async def test_a_program_cannot_score_by_writing_results_itself(code_world: CodeWorld) -> None:
    cheat = "import os\nos.write(3, b'{\"value\": true}\\n' * 50)\nos._exit(0)"
    reply = await play(code_world, cheat, cheat, seed=3)
    assert reply.metrics["passed"] < 1.0


async def test_programs_are_counted_where_the_service_counts(code_world: CodeWorld) -> None:
    metrics = Metrics("test")
    code_world.use_meter(metrics)
    await play(code_world, SOLUTIONS)
    text = metrics.render().decode()
    assert 'sandbox_programs_total{status="ok"} 1.0' in text
    assert "sandbox_wait_seconds_count 1.0" in text


def test_code_is_taken_from_the_last_block_or_the_whole_message() -> None:
    assert code_in("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```") == "y = 2\n"
    assert code_in("```\nx = 1\n") == "x = 1\n"
    assert code_in("x = 1") == "x = 1"


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (1, True, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        (0.1 + 0.2, 0.3, True),
        (10**400, 0.5, False),
        ({"a": 1}, {"a": 1}, True),
        ("1", 1, False),
        (None, None, True),
    ],
)
def test_results_are_compared_by_value_and_kind(found, expected, same: bool) -> None:
    assert equal(found, expected) is same
