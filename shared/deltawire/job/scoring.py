"""Add up a job's reward functions over one episode.

An error or a timeout of a function is counted and makes the whole score an error, so that the
sample is dropped; a reward nobody could compute is never a 0. `on_error="zero"` says otherwise.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat

from deltawire.job.fault import describe
from deltawire.job.reward import Answer, Rewarder, Score
from deltawire.job.transcript import Transcript


class Runner(Protocol):
    """Runs one call with a deadline, off the event loop when it may block."""

    async def __call__(
        self,
        call: Callable[[], Answer | Awaitable[Answer]],
        *,
        timeout_s: float,
        blocking: bool,
    ) -> Answer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScore:
    """The weighted sum, its parts, and finer scores where a function gave them."""

    reward: float | None
    """None when a function failed: drop the sample."""
    parts: dict[str, float] = field(default_factory=dict)
    """Values before weighting, by function name."""
    turns: list[float] | None = None
    spans: list[tuple[int, int, float]] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    """Function name -> what went wrong."""


async def score_episode(
    rewards: Sequence[Rewarder], episode: Transcript, *, run: Runner
) -> EpisodeScore:
    """Ask every function in turn. Raises nothing: what goes wrong stands in `errors`."""
    scores: list[tuple[Rewarder, Score]] = []
    errors: dict[str, str] = {}
    dropped = False
    for part in rewards:
        try:
            answer = await run(
                lambda part=part: part.score(episode),  # type: ignore[misc]
                timeout_s=part.timeout_s,
                blocking=part.blocking,
            )
            score = _as_score(part.name, answer)
        except Exception as error:  # noqa: BLE001 - the border to a user's reward function
            errors[part.name] = describe(error)
            dropped = dropped or part.on_error == "drop"
            continue
        if score is not None:
            scores.append((part, score))
    return EpisodeScore(
        reward=None if dropped else sum(part.weight * score.value for part, score in scores),
        parts={part.name: score.value for part, score in scores},
        turns=_weighted_turns(scores),
        spans=[
            (start, end, part.weight * value)
            for part, score in scores
            for start, end, value in score.spans or ()
        ]
        or None,
        errors=errors,
    )


def _as_score(name: str, answer: Answer) -> Score | None:
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        if len(answer) != 1:
            raise ValueError(f"{name} got one completion and returned {len(answer)} rewards")
        answer = answer[0]
    if answer is None:
        return None
    if not isinstance(answer, Score | SupportsFloat):
        raise TypeError(
            f"{name} returned {answer!r:.60}; a reward is a number, a Score, or None for "
            "'does not apply'"
        )
    score = answer if isinstance(answer, Score) else Score(value=float(answer))
    finite = [score.value, *(score.turns or ()), *(value for *_, value in score.spans or ())]
    if not all(math.isfinite(value) for value in finite):
        raise ValueError(f"{name} returned {score.value}, which is not a finite number")
    return score


def _weighted_turns(scores: list[tuple[Rewarder, Score]]) -> list[float] | None:
    rows = [[part.weight * value for value in score.turns] for part, score in scores if score.turns]
    if not rows:
        return None
    longest = max(len(row) for row in rows)
    padded = [row + [0.0] * (longest - len(row)) for row in rows]
    return [sum(column) for column in zip(*padded, strict=True)]
