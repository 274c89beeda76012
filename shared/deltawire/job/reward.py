"""Named reward functions with weights: `@reward` over a plain function of the episode."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, overload, runtime_checkable

from deltawire.job.transcript import Transcript
from deltawire.protocol.errors import JobError

OnError = Literal["drop", "zero"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A richer answer of a reward function than one number."""

    value: float
    turns: list[float] | None = None
    """One score a turn of the policy."""
    spans: list[tuple[int, int, float]] | None = None
    """(start, end, score) over characters of the policy's last message."""


Answer: TypeAlias = float | Score | Sequence[float | None] | None
RewardBody: TypeAlias = Callable[..., Answer | Awaitable[Answer]]


@runtime_checkable
class Rewarder(Protocol):
    """One named part of a job's reward."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def on_error(self) -> OnError: ...
    @property
    def blocking(self) -> bool: ...
    def score(self, episode: Transcript) -> Answer | Awaitable[Answer]:
        """Judge an episode. None means: does not apply."""
        ...


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function with a name and a weight. Still callable as the function it wraps.

    Two signatures are understood: `f(episode)`, and TRL's
    `f(completions, prompts=..., **columns)`, which gets lists of one and returns a list of one.
    """

    body: RewardBody
    name: str
    weight: float = 1.0
    timeout_s: float = 10.0
    """Seconds until the function is given up."""
    on_error: OnError = "drop"
    """What an error or a timeout means: drop the sample, or count this part as 0."""

    @property
    def blocking(self) -> bool:
        """Whether it must run in a thread."""
        return not inspect.iscoroutinefunction(self.body)

    def __call__(self, *args: object, **kwargs: object) -> Answer | Awaitable[Answer]:
        return self.body(*args, **kwargs)

    def score(self, episode: Transcript) -> Answer | Awaitable[Answer]:
        """Judge an episode by whichever signature the function has."""
        parameters = inspect.signature(self.body).parameters
        if "completions" not in parameters:
            return self.body(episode)
        return self.body(**_trl_arguments(episode, parameters))


def _trl_arguments(
    episode: Transcript, parameters: Mapping[str, inspect.Parameter]
) -> dict[str, object]:
    prompt = episode.messages[: episode.prompt_length]
    spoken = episode.messages[episode.prompt_length :]
    chat = bool(episode.row.get("prompt")) and not isinstance(episode.row.get("prompt"), str)
    offered: dict[str, object] = {
        "completions": [spoken] if chat else [episode.last],
        "prompts": [prompt] if chat else [prompt[-1]["content"] if prompt else ""],
        **{column: [value] for column, value in episode.row.items() if column != "prompt"},
    }
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return offered
    missing = [name for name in _required(parameters) if name not in offered]
    if missing:
        raise JobError(
            f"a reward asks for {', '.join(missing)}, and the episode offers "
            f"{', '.join(offered)}; name its parameters after columns of the dataset"
        )
    return {name: value for name, value in offered.items() if name in parameters}


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]


def _demand_signature(body: RewardBody) -> None:
    """Refuse, where the file is read, a function that no episode could be given to."""
    signature = inspect.signature(body)
    if "completions" in signature.parameters:
        return
    try:
        signature.bind(object())
    except TypeError:
        raise JobError(
            f"{body.__name__}{signature} cannot be a reward: it takes (episode), or "
            "(completions, **columns) as in TRL"
        ) from None


@overload
def reward(function: RewardBody, /) -> RewardFunction: ...
@overload
def reward(
    function: None = None,
    /,
    *,
    weight: float = 1.0,
    name: str | None = None,
    timeout_s: float = 10.0,
    on_error: OnError = "drop",
) -> Callable[[RewardBody], RewardFunction]: ...
def reward(
    function: RewardBody | None = None,
    /,
    *,
    weight: float = 1.0,
    name: str | None = None,
    timeout_s: float = 10.0,
    on_error: OnError = "drop",
) -> RewardFunction | Callable[[RewardBody], RewardFunction]:
    """Make a reward of a function, sync or async: `@reward` or `@reward(weight=0.5)`."""

    def wrap(body: RewardBody) -> RewardFunction:
        _demand_signature(body)
        return RewardFunction(body, name or body.__name__, weight, timeout_s, on_error)

    return wrap if function is None else wrap(function)
