"""Small programming problems with hidden tests, made from a seed.

The reference solutions are ours and run in this process; what they return is what a program's
results are compared with.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import JsonValue

from deltawire_environment.sandbox.pool import Call

Arguments = list[JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One call and what it must return."""

    __test__ = False  # no test of ours, whatever pytest thinks of the name

    arguments: Arguments
    expected: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is asked, and how an answer is tested."""

    function: str
    text: str
    tests: tuple[Test, ...]

    def calls(self) -> list[Call]:
        """The calls without what is expected of them."""
        return [Call(function=self.function, arguments=test.arguments) for test in self.tests]


@dataclass(frozen=True, slots=True)
class _Kind:
    signature: str
    text: str
    draw: Callable[[random.Random], Arguments]
    solve: Callable[..., JsonValue]


def _word(rng: random.Random, longest: int = 10) -> str:
    return "".join(rng.choice("abcdeilmnorst") for _ in range(rng.randint(0, longest)))


def _numbers(rng: random.Random, longest: int = 8) -> list[JsonValue]:
    return [rng.randint(-20, 20) for _ in range(rng.randint(1, longest))]


def _run_lengths(text: str) -> JsonValue:
    runs: list[list[JsonValue]] = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] = int(str(runs[-1][1])) + 1
        else:
            runs.append([letter, 1])
    return list[JsonValue](runs)


def _gcd(a: int, b: int) -> JsonValue:
    while b:
        a, b = b, a % b
    return a


_KINDS = (
    _Kind("double(n)", "returns twice the integer n",
          lambda r: [r.randint(-50, 50)], lambda n: 2 * n),
    _Kind("add(a, b)", "returns the sum of two integers",
          lambda r: [r.randint(-50, 50), r.randint(-50, 50)], lambda a, b: a + b),
    _Kind("largest(numbers)", "returns the largest of a list of integers",
          lambda r: [_numbers(r)], lambda numbers: max(numbers)),
    _Kind("backwards(text)", "returns the string text reversed",
          lambda r: [_word(r)], lambda text: text[::-1]),
    _Kind("vowels(text)", "returns how many of a, e, i, o, u the string text holds",
          lambda r: [_word(r)], lambda text: sum(letter in "aeiou" for letter in text)),
    _Kind("digit_sum(n)", "returns the sum of the decimal digits of the non-negative integer n",
          lambda r: [r.randint(0, 99_999)], lambda n: sum(map(int, str(n)))),
    _Kind("evens(numbers)", "returns the even numbers of a list of integers, in order",
          lambda r: [_numbers(r)], lambda numbers: [n for n in numbers if n % 2 == 0]),
    _Kind("palindrome(text)", "returns True when the string text reads the same backwards",
          lambda r: [(lambda w: w + w[::-1] if r.random() < 0.5 else w)(_word(r, 5))],
          lambda text: text == text[::-1]),
    _Kind("unique(numbers)", "returns the list without repeated numbers, first ones kept, in order",
          lambda r: [_numbers(r)], lambda numbers: list(dict.fromkeys(numbers))),
    _Kind("gcd(a, b)", "returns the greatest common divisor of two positive integers",
          lambda r: [r.randint(1, 200), r.randint(1, 200)], _gcd),
    _Kind("run_lengths(text)", "returns a list of [letter, count] for the runs of equal letters",
          lambda r: ["".join(letter * r.randint(1, 4) for letter in _word(r, 4))], _run_lengths),
    _Kind("cumulative(numbers)", "returns the list of running sums of a list of integers",
          lambda r: [_numbers(r)], lambda ns: [sum(ns[: at + 1]) for at in range(len(ns))]),
)  # fmt: skip


def make_problem(rng: random.Random, *, tests: int) -> Problem:
    """A problem with that many hidden tests; the same for the same seed."""
    kind = rng.choice(_KINDS)
    drawn = [kind.draw(rng) for _ in range(tests)]
    return Problem(
        function=kind.signature.partition("(")[0],
        text=f"Write a Python function {kind.signature} that {kind.text}.",
        tests=tuple(Test(arguments=a, expected=kind.solve(*a)) for a in drawn),
    )


def _close(found: float, expected: float) -> bool:
    try:
        return abs(found - expected) <= 1e-9 * max(1.0, abs(expected))
    except OverflowError:  # an integer beyond every float is not near one
        return False


def equal(found: JsonValue, expected: JsonValue) -> bool:
    """Whether a result is right. A bool is no number; floats may differ by rounding."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return _close(found, expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[k], expected[k]) for k in found)
    return found == expected
