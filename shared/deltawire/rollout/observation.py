"""What an environment answered, in one shape, whoever's environment it is.

Ours sends `chat` (the new messages of this turn), `metrics`, `info`, `reward_parts`, `status` and,
in worlds with several, `agent` and `agent_rewards`. Foreign OpenEnv environments send a `prompt`,
some `messages` or a text; what none of these is, is shown to the policy as JSON.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltawire.protocol.errors import EpisodeFailed
from deltawire.protocol.rollouts import RolloutStatus

_TEXT_FIELDS = ("text", "prompt", "content", "message", "result", "output", "observation")
_ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One answer. `messages` are new ones only."""

    messages: list[dict[str, str]]
    reward: float | None = None
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    reward_parts: dict[str, float] = field(default_factory=dict)
    status: RolloutStatus = "ok"
    reason: str = ""
    agent: str = "policy"
    agent_rewards: dict[str, float] = field(default_factory=dict)
    turn_reward: float | None = None
    turn_rewards: list[float | None] = field(default_factory=list)
    """Scores of all turns so far, given at the end."""
    span_rewards: list[tuple[int, int, float]] = field(default_factory=list)
    """(start, end, score) over characters of the last thing the policy said."""


def parse_observation(data: Mapping[str, Any]) -> Observation:
    """From the `data` of an observation frame. Raises EpisodeFailed for one that makes no sense."""
    seen = data.get("observation")
    if not isinstance(seen, Mapping):
        raise EpisodeFailed(f"an observation frame without an observation: {sorted(data)}")
    try:
        return Observation(
            messages=_messages(seen),
            reward=_number(data.get("reward")),
            done=bool(data.get("done", False)),
            metrics=_numbers(seen.get("metrics")),
            info=dict(seen["info"]) if isinstance(seen.get("info"), Mapping) else {},
            reward_parts=_rewards(seen.get("reward_parts")),
            status=seen["status"] if seen.get("status") in ("truncated", "error") else "ok",
            reason=str(seen.get("reason") or ""),
            agent=str(seen.get("agent") or "policy"),
            agent_rewards=_rewards(seen.get("agent_rewards")),
            turn_reward=_number(seen.get("turn_reward")),
            turn_rewards=[_number(reward) for reward in seen.get("turn_rewards") or []],
            span_rewards=[
                (int(start), int(end), _finite(score))
                for start, end, score in seen.get("span_rewards") or []
            ],
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeFailed(f"an observation we cannot read: {error}") from error


def _messages(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    for name in ("chat", "messages"):
        if isinstance(seen.get(name), list):
            return [_message(message) for message in seen[name]]
    for name in _TEXT_FIELDS:
        if isinstance(seen.get(name), str):
            return [{"role": "user", "content": seen[name]}] if seen[name] else []
    return [{"role": "user", "content": json.dumps(seen, ensure_ascii=False, sort_keys=True)}]


def _message(message: object) -> dict[str, str]:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise ValueError(f"a message is a role and a content; found {str(message)[:80]}")
    role = message.get("role")
    return {"role": role if role in _ROLES else "user", "content": message["content"]}


def _number(value: object) -> float | None:
    return None if value is None else _finite(value)


def _finite(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"a reward of {number}")
    return number


def _rewards(values: object) -> dict[str, float]:
    return {name: _finite(value) for name, value in _numbers(values).items()}


def _numbers(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {
        str(name): float(value) for name, value in values.items() if isinstance(value, int | float)
    }
