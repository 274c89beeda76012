"""The frames of the OpenEnv WebSocket protocol, as version 0.10 of its client speaks them.

Ours beyond it: a `request_id` beside `type` makes a request idempotent and is echoed in its answer.
"""

import json
from typing import Literal

from pydantic import Field, JsonValue, ValidationError

from deltawire.job.world import BadAction, Reply
from deltawire.protocol.errors import CapacityReached, DeltawireError, EpisodeFailed
from deltawire.protocol.wire_model import WireModel
from deltawire_environment.sessions import Frame, SessionGone

ErrorCode = Literal[
    "INVALID_JSON",
    "UNKNOWN_TYPE",
    "VALIDATION_ERROR",
    "EXECUTION_ERROR",
    "CAPACITY_REACHED",
    "FACTORY_ERROR",
    "SESSION_ERROR",
]

KNOWN_TYPES = frozenset({"reset", "step", "state", "close", "mcp"})


class Request(WireModel):
    """What a client sends."""

    type: Literal["reset", "step", "state", "close", "mcp"]
    data: dict[str, JsonValue] = Field(default_factory=dict)
    request_id: str | None = Field(None, min_length=1, max_length=255)


class FrameError(Exception):
    """A frame that is no request; the answer says why."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(str(frame))
        self.frame = frame


def parse(text: str) -> Request:
    """A frame's request. Raises FrameError with the answer to send."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(error_frame("INVALID_JSON", f"Invalid JSON: {error}")) from None
    kind = message.get("type", "") if isinstance(message, dict) else ""
    if kind not in KNOWN_TYPES if isinstance(kind, str) else True:
        raise FrameError(error_frame("UNKNOWN_TYPE", f"Unknown message type: {str(kind)[:64]}"))
    try:
        return Request.model_validate(message)
    except ValidationError as error:
        raise FrameError(validation_frame(error)) from None


def observation_frame(reply: Reply) -> Frame:
    """Reward and done are lifted out of the observation."""
    return {"type": "observation", "data": result_of(reply)}


def result_of(reply: Reply) -> Frame:
    """Observation, reward and done, as both WebSocket and HTTP carry them."""
    return {"observation": reply.observation(), "reward": reply.reward, "done": reply.done}


def error_frame(code: ErrorCode, message: str, **more: JsonValue) -> Frame:
    """A typed error."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def validation_frame(error: ValidationError) -> Frame:
    """Which fields are wrong, and how. Values are not repeated."""
    wrong: list[JsonValue] = [
        {"loc": [str(part) for part in item["loc"]], "msg": item["msg"], "type": item["type"]}
        for item in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    return error_frame("VALIDATION_ERROR", "Invalid message", errors=wrong)


def fault_frame(error: BadAction | DeltawireError, **more: JsonValue) -> Frame:
    """The frame for an error of the tree, or of the client."""
    code: ErrorCode
    match error:
        case BadAction():
            code = "VALIDATION_ERROR"
        case CapacityReached():
            code = "CAPACITY_REACHED"
        case SessionGone():
            code = "SESSION_ERROR"
        case EpisodeFailed():
            code = "EXECUTION_ERROR"
        case _:
            code = "EXECUTION_ERROR"
    return error_frame(code, str(error), **more)
