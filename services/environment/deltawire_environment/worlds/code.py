"""The code world: the policy writes Python, hidden tests score it in a sandbox."""

import random
import re

from pydantic import BaseModel, Field, JsonValue

from deltawire.job.rows import Row
from deltawire.job.transcript import Message
from deltawire.job.world import (
    Action,
    BadAction,
    Episode,
    Meter,
    Reply,
    World,
    WorldConfig,
    message_of,
)
from deltawire.protocol.rollouts import Task
from deltawire_environment.sandbox.pool import Mode, Outcome, Program, SandboxPool
from deltawire_environment.worlds.problems import Problem, Test, equal, make_problem

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class CodeConfig(WorldConfig):
    """How programs are asked for, run and scored."""

    max_turns: int = Field(1, ge=1)
    """Tries; after a failed one the policy reads what went wrong."""
    tests: int = Field(5, ge=1, le=64)
    """Hidden tests of a problem."""
    partial: bool = False
    """Pay for the share of tests that pass instead of all or nothing."""
    wall_s: float = Field(5.0, gt=0)
    cpu_s: int = Field(4, ge=1)
    memory_bytes: int = Field(128 * 1024 * 1024, ge=16 * 1024 * 1024)
    sandboxes: int = Field(64, ge=1)
    """Programs at a time."""
    files: Mode = "private"
    """closed: no file may be opened, even where a private scratch folder could be had."""
    system: str = "You write Python. Answer with one code block."


class CodeWorld(World):
    """A problem for every seed; or one from a row `{function, prompt, tests}`."""

    name = "code"
    description = "Write a Python function; hidden tests score it."
    Config = CodeConfig

    def __init__(self, config: CodeConfig) -> None:
        self.config = config
        self.max_turns = config.max_turns
        self.sandboxes = SandboxPool(
            limit=config.sandboxes,
            mode=config.files,
            memory_bytes=config.memory_bytes,
            cpu_s=config.cpu_s,
        )

    async def start(self, task: Task, rng: random.Random) -> tuple[Episode, Reply]:
        if "tests" in task.row:
            problem = problem_of(dict(task.row))
        else:
            problem = make_problem(rng, tests=self.config.tests)
        await self.sandboxes.expect()
        chat = [Message(role="system", content=self.config.system)] if self.config.system else []
        chat.append(Message(role="user", content=problem.text))
        return _Attempt(self.config, self.sandboxes, problem), Reply(chat=chat)

    def use_meter(self, meter: Meter) -> None:
        self.sandboxes.meter = meter

    def close(self) -> None:
        self.sandboxes.close()


class _Attempt(Episode):
    def __init__(self, config: CodeConfig, sandboxes: SandboxPool, problem: Problem) -> None:
        self._config, self._sandboxes, self._problem = config, sandboxes, problem
        self._turns = 0

    async def step(self, action: Action) -> Reply:
        self._turns += 1
        program = Program(
            code=code_in(message_of(action)),
            calls=self._problem.calls(),
            wall_s=self._config.wall_s,
        )
        outcome = await self._sandboxes.run(program)
        passed = passes(self._problem, outcome)
        share = sum(passed) / len(passed)
        solved = all(passed)
        done = solved or self._turns >= self._config.max_turns
        reward = share if self._config.partial else float(solved)
        return Reply(
            text="" if done else complaint(self._problem, outcome, passed),
            reward=reward if done else None,
            turn_reward=share,
            done=done,
            metrics={
                "solved": float(solved),
                "passed": share,
                "ran": float(outcome.status == "ok"),
            },
            info={"status": outcome.status, "output": outcome.output[-500:]},
        )

    def close(self) -> None:
        self._sandboxes.forget()


def code_in(message: str) -> str:
    """The last fenced block of a message; the whole message when there is none."""
    blocks = _FENCED.findall(message)
    return str(blocks[-1]) if blocks else message


def passes(problem: Problem, outcome: Outcome) -> list[bool]:
    """Which tests passed. One that was never answered did not."""
    answers = [*outcome.results, *({} for _ in problem.tests)]
    return [
        "value" in answer and equal(answer["value"], test.expected)
        for test, answer in zip(problem.tests, answers, strict=False)
    ]


def complaint(problem: Problem, outcome: Outcome, passed: list[bool]) -> str:
    """What the policy reads after a failed try: never an expected value."""
    if outcome.status != "ok":
        said = outcome.output.strip().splitlines()
        return f"Your program failed ({outcome.status}). {said[-1] if said else ''}".strip()
    first = passed.index(False)
    answer: dict[str, JsonValue] = outcome.results[first] if first < len(outcome.results) else {}
    call = f"{problem.function}({', '.join(map(repr, problem.tests[first].arguments))})"
    if "error" in answer:
        return f"{call} raised {answer['error']}. Try again."
    return f"{passed.count(True)} of {len(passed)} tests passed; {call} is wrong. Try again."


def problem_of(row: Row) -> Problem:
    """A problem from a row. Raises BadAction for a malformed one."""
    try:
        tests = [_TestRow.model_validate(test) for test in _nonempty(row["tests"])]
        return Problem(
            function=str(row["function"]),
            text=str(row["prompt"]),
            tests=tuple(Test(arguments=test.args, expected=test.expect) for test in tests),
        )
    except (KeyError, ValueError) as error:
        raise BadAction(
            f"a code row is {{function, prompt, tests: [{{args: [...], expect}}]}}; found "
            f"{sorted(row)} ({error!r:.200})"
        ) from None


class _TestRow(BaseModel):
    args: list[JsonValue]
    expect: JsonValue


def _nonempty(tests: JsonValue) -> list[JsonValue]:
    if not isinstance(tests, list) or not tests:
        raise ValueError("tests is a list of at least one")
    return tests
