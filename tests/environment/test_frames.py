"""Parsing what strangers send: a request, or the answer that says what is wrong."""

import json

from hypothesis import given
from hypothesis import strategies as st

from deltawire.job.world import Reply
from deltawire_environment.frames import FrameError, Request, observation_frame, parse

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "data", "request_id", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
kinds = st.sampled_from(["reset", "step", "state", "close", "mcp", "", "other"])
frames = st.fixed_dictionaries(
    {"type": kinds | plain}, optional={"data": plain, "request_id": plain}
)


@given(st.text() | (plain | frames).map(json.dumps))
def test_any_text_is_a_request_or_gets_a_typed_error(text: str) -> None:
    try:
        assert isinstance(parse(text), Request)
    except FrameError as error:
        data = error.frame["data"]
        assert isinstance(data, dict)
        assert data["code"] in ("INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR")
        json.dumps(error.frame)


def test_reward_and_done_stand_beside_the_observation() -> None:
    frame = observation_frame(Reply(text="Go on.", reward=0.5, metrics={"m": 1.0}))
    assert frame == {
        "type": "observation",
        "data": {
            "observation": {
                "chat": [{"role": "user", "content": "Go on."}],
                "text": "Go on.",
                "metrics": {"m": 1.0},
                "info": {},
                "status": "ok",
            },
            "reward": 0.5,
            "done": False,
        },
    }
