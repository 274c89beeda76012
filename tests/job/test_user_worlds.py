"""A user's own class, a class of tools as TRL takes it, and a data set, each as a world."""

import inspect
import json
import random
import threading
from pathlib import Path

import pytest

from deltawire.job import Env, Job, Message, Reply, reward
from deltawire.job.resolve import resolve
from deltawire.job.rows import Rows
from deltawire.job.toolset import parse_calls, tool_of
from deltawire.job.world import Episode
from deltawire.protocol.errors import JobError
from deltawire.protocol.rollouts import Task


async def started(env: Env, task: Task | None = None, **job: object) -> tuple[Episode, Reply]:
    task = task or Task()
    world = resolve(Job(name="any", env=env, **job)).world  # type: ignore[arg-type]
    begun = world.start(task, random.Random(f"{task.seed}"))
    return await begun if inspect.isawaitable(begun) else begun


async def stepped(episode: Episode, message: str) -> Reply:
    reply = episode.step({"message": message})
    return await reply if inspect.isawaitable(reply) else reply


class Plain:
    def __init__(self, greeting: str = "Hi") -> None:
        self.greeting = greeting
        self.closed = False

    def reset(self, *, seed: int, split: str, level: int = 0) -> str:
        return f"{self.greeting} {seed} {split} {level}"

    def step(self, message: str) -> tuple[str, float, bool]:
        return message.upper(), 0.5, message == "end"

    def close(self) -> None:
        self.closed = True


async def test_reset_gets_what_it_names_and_rows_fill_the_rest() -> None:
    task = Task(seed=4, split="eval", row={"level": 2, "unknown": 1})
    episode, first = await started(Env(Plain, greeting="Yo"), task)
    assert first.text == "Yo 4 eval 2"
    reply = await stepped(episode, "end")
    assert (reply.text, reply.reward, reply.done) == ("END", 0.5, True)
    episode.close()
    assert episode.game.closed  # type: ignore[attr-defined]


class Varied:
    """Returns whatever the message names."""

    def reset(self, **row: object) -> list[Message]:
        return [Message(role="system", content="Be brief."), Message(role="user", content="Go.")]

    def step(self, message: str) -> object:
        return {
            "none": None,
            "text": "next",
            "reply": Reply(text="r", reward=1.0, done=True),
            "dict": {"text": "d", "metrics": {"m": 1.0}},
            "messages": [Message(role="user", content="m")],
        }[message]


@pytest.mark.parametrize(
    ("message", "text", "done"),
    [
        ("none", [], False),
        ("text", ["next"], False),
        ("reply", ["r"], True),
        ("dict", ["d"], False),
    ],
)
async def test_every_kind_of_answer_is_understood(message: str, text: list, done: bool) -> None:
    episode, first = await started(Env(Varied))
    assert [m["role"] for m in first.messages] == ["system", "user"]
    reply = await stepped(episode, message)
    assert [m["content"] for m in reply.messages] == text
    assert reply.done is done


async def test_an_unknown_field_of_a_dict_is_an_error_with_a_suggestion() -> None:
    class Typo:
        def reset(self) -> str:
            return ""

        def step(self, message: str) -> dict:
            return {"rewrd": 1.0}

    episode, _ = await started(Env(Typo))
    with pytest.raises(TypeError, match="did you mean 'reward'"):
        await stepped(episode, "x")


class Asynchronous:
    async def reset(self) -> str:
        return "Async."

    async def step(self, message: str) -> str:
        return threading.current_thread().name

    async def get_reward(self) -> float:
        return 0.7


async def test_async_methods_run_on_the_event_loop_and_plain_ones_may_block() -> None:
    resolved = resolve(Job(name="any", env=Env(Asynchronous, max_turns=1)))
    assert resolved.world.blocking is False
    assert resolve(Job(name="any", env=Env(Plain))).world.blocking is True
    episode, _ = await started(Env(Asynchronous, max_turns=1))
    reply = await stepped(episode, "hello")
    assert reply.text == "MainThread"
    assert (reply.done, reply.reward) == (True, 0.7)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (type("NoReset", (), {"step": lambda self, message: ""}), "has no reset"),
        (type("Nothing", (), {"reset": lambda self: ""}), "has no step"),
    ],
)
def test_a_class_without_its_methods_is_refused(kind: type, said: str) -> None:
    with pytest.raises(JobError, match=said):
        resolve(Job(name="any", env=Env(kind)))


def test_an_argument_the_class_does_not_take_is_refused() -> None:
    with pytest.raises(JobError, match="did you mean 'greeting'"):
        resolve(Job(name="any", env=Env(Plain, greting="Yo")))
    for world in (Plain, "letters"):
        with pytest.raises(JobError, match="did you mean 'max_turns'"):
            resolve(Job(name="any", env=Env(world, max_turn=3)))


class Counter:
    """As an `environment_factory` of TRL."""

    def reset(self, start: int = 0, **row: object) -> str | None:
        self.value = start
        return f" You are at {start}."

    def add(self, amount: int, twice: bool = False) -> str:
        """
        Add to the counter.

        Args:
            amount: How much to add.
            twice (bool): Do it twice.

        Returns:
            The new value.
        """
        self.value += amount * (2 if twice else 1)
        return str(self.value)

    def get_reward(self) -> float:
        return float(self.value == 10)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_a_trl_environment_class_works_unchanged() -> None:
    rows = [{"prompt": [{"role": "user", "content": "Reach 10."}], "start": 4, "split": "train"}]
    episode, first = await started(Env(Counter, dataset=rows, max_turns=5))
    assert [m["role"] for m in first.messages] == ["system", "user", "user"]
    assert first.messages[1]["content"] == "Reach 10."
    assert "You are at 4." in first.messages[2]["content"]
    reply = await stepped(episode, call("add", amount=3, twice=True))
    assert reply.messages == [{"role": "tool", "content": "10"}]
    end = await stepped(episode, "There.")
    assert (end.done, end.reward) == (True, 1.0)


async def test_tool_calls_are_counted_over_the_episode() -> None:
    episode, _ = await started(Env(Counter, max_turns=5))
    await stepped(episode, call("add", amount=3) + call("add", amount="x"))
    await stepped(episode, call("subtract", amount=3))
    end = await stepped(episode, "There.")
    assert end.metrics == {"tool_calls": 3.0, "tool_errors": 2.0}


async def test_the_turn_limit_ends_an_episode_that_is_then_judged() -> None:
    episode, _ = await started(Env(Counter, max_turns=2))
    assert not (await stepped(episode, call("add", amount=3))).done
    end = await stepped(episode, call("add", amount=7))
    assert (end.done, end.status, end.reward) == (True, "ok", 1.0)


def test_a_call_too_deep_to_read_is_told_to_the_policy() -> None:
    deep = '{"name": ' + "[" * 100_000 + "}"
    [read] = parse_calls(f"<tool_call>{deep}</tool_call>")
    assert "not JSON" in read.problem


def test_a_tools_schema_comes_from_its_hints_and_its_docstring() -> None:
    tool = tool_of("add", Counter.add)
    assert tool.description == "Add to the counter."
    assert tool.parameters["required"] == ["amount"]
    assert tool.parameters["properties"] == {
        "amount": {"type": "integer", "description": "How much to add."},
        "twice": {"type": "boolean", "default": False, "description": "Do it twice."},
    }


@reward
def any_reward(episode: object) -> float:
    return 0.0


async def test_a_dataset_asks_its_rows_and_hides_the_answer() -> None:
    rows = [{"question": f"q{n}", "gold": f"a{n}", "split": "train"} for n in range(5)]
    env = Env(dataset=rows, prompt="question", system="Short.", answer="gold")
    episode, first = await started(env, Task(index=2))
    assert [m["content"] for m in first.messages] == ["Short.", "q2"]
    assert "a2" not in json.dumps(first.observation())
    assert episode.row["gold"] == "a2"
    assert (await stepped(episode, " a2 ")).reward == 1.0


def test_a_dataset_without_any_reward_is_refused() -> None:
    with pytest.raises(JobError, match="no reward of its own"):
        resolve(Job(name="any", env=Env(dataset=[{"prompt": "q"}])))
    resolve(Job(name="any", env=Env(dataset=[{"prompt": "q"}]), rewards=[any_reward]))


def test_a_line_separator_in_a_text_ends_no_row(tmp_path: Path) -> None:
    rows = [{"prompt": "one\u2028two"}, {"prompt": "three\x85four"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    read = Rows("rows.jsonl", folder=tmp_path)
    assert sum(read.count(split) for split in read.names()) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "q"}\n{broken\n', r"rows.jsonl:2 is not JSON"),
        ("[1]\n", "rows.jsonl:1 is not a JSON object"),
        ("\n", "the data set is empty"),
        ('{"question": "q"}\n', "no column 'prompt'; it has: question"),
    ],
)
def test_a_bad_data_file_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    job = Job(name="any", env=Env(dataset="rows.jsonl"), rewards=[any_reward], folder=tmp_path)
    with pytest.raises(JobError, match=said):
        resolve(job)


def test_a_missing_data_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    job = Job(name="any", env=Env(dataset="no.jsonl"), rewards=[any_reward], folder=tmp_path)
    with pytest.raises(JobError, match=r"no data set .*no\.jsonl; a path is relative to the job"):
        resolve(job)


def test_rows_split_for_themselves_and_the_same_task_gets_the_same_row() -> None:
    rows = Rows([{"n": n} for n in range(400)])
    train, held = rows.count("train"), rows.count("eval")
    assert train + held == 400
    assert 15 <= held <= 80
    assert not {rows.pick(Task(index=i), random.Random())["n"] for i in range(train)} & {
        rows.pick(Task(index=i, split="eval"), random.Random())["n"] for i in range(held)
    }
    task = Task(seed=9)
    assert rows.pick(task, random.Random(9)) == rows.pick(task, random.Random(9))


def test_a_dict_of_splits_and_a_column_of_splits_are_both_kept() -> None:
    by_name = Rows({"train": [{"n": 1}], "test": [{"n": 2}]})
    by_column = Rows([{"n": 1, "split": "train"}, {"n": 2, "split": "eval"}])
    for rows in (by_name, by_column):
        assert rows.names() == ["train", "eval"]
        assert rows.pick(Task(split="eval"), random.Random(0))["n"] == 2
