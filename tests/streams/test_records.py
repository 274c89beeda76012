"""Records: what goes in comes out; what came from outside is judged first."""

import struct
from pathlib import Path

import msgpack
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.protocol.errors import (
    MalformedMessage,
    PayloadTooLarge,
    ProtocolError,
    UnknownSchema,
)
from deltawire.protocol.generation import Sampling
from deltawire.protocol.rollouts import (
    Rollout,
    RolloutGroup,
    Sequence,
    Task,
    Ticket,
    Turn,
)
from deltawire.protocol.versions import VersionSpan
from deltawire.streams import records
from deltawire.streams.records import decode_group, decode_ticket, encode_group, encode_ticket

GOLDEN = Path(__file__).parent.parent / "golden"

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.integers(0, 2**32 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FINITE | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def sequences(draw) -> Sequence:
    n = draw(st.integers(0, 9))

    def per_token(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    return Sequence(
        agent=draw(st.text(max_size=4)),
        token_ids=per_token(IDS),
        loss_mask=per_token(st.integers(0, 1)),
        logprobs=per_token(FLOAT32),
        spans=[VersionSpan(version=draw(st.integers(0, 99)), start=0, end=n)] if n else [],
        turns=[Turn(start=0, end=n, reward=draw(st.none() | FINITE))],
        reward=draw(FINITE),
        token_rewards=per_token(FINITE) if draw(st.booleans()) else None,
        sampling_mask=per_token(st.lists(IDS, max_size=3)) if draw(st.booleans()) else None,
        routed_experts=per_token(st.lists(st.lists(IDS, max_size=2), max_size=2))
        if draw(st.booleans())
        else None,
    )


@st.composite
def groups(draw) -> RolloutGroup:
    rollouts = [
        Rollout(
            rollout_id=str(number),
            status=draw(st.sampled_from(["ok", "truncated", "error"])),
            sequences=draw(st.lists(sequences(), max_size=2)),
            reward=draw(FINITE),
            info=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
            metrics=draw(st.dictionaries(st.text(max_size=3), FINITE, max_size=2)),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    row = draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2))
    return RolloutGroup(group_id="g", task=Task(seed=1, row=row), rollouts=rollouts)


@given(groups())
@settings(max_examples=100)
def test_a_group_comes_out_as_it_went_in(group):
    assert decode_group(encode_group(group)) == group


@given(st.integers(0, 2**31), st.lists(st.text(max_size=8), max_size=3), st.floats(0.1, 1.0))
def test_a_ticket_comes_out_as_it_went_in(seed, stop, top_p):
    ticket = Ticket(
        ticket_id="t",
        task=Task(seed=seed),
        group_size=8,
        sampling=Sampling(stop=stop, top_p=top_p),
    )
    assert decode_ticket(encode_ticket(ticket)) == ticket


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_a_protocol_error(raw):
    for decode in (decode_ticket, decode_group):
        with pytest.raises((ProtocolError, PayloadTooLarge)):
            decode(raw)


@given(st.data())
@settings(max_examples=60)
def test_a_damaged_group_is_never_something_else(data):
    raw = bytearray(encode_group(data.draw(groups())))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        group = decode_group(bytes(raw))
    except (ProtocolError, PayloadTooLarge):
        return
    assert isinstance(group, RolloutGroup)


def test_large_records_are_compressed_and_small_ones_are_not(make_group, make_ticket):
    assert encode_ticket(make_ticket())[0] == 0
    group = make_group()
    [rollout, _] = group.rollouts
    [sequence] = rollout.sequences
    long = sequence.model_copy(
        update={
            "token_ids": [7] * 5000,
            "loss_mask": [1] * 5000,
            "logprobs": [-0.5] * 5000,
        }
    )
    large = group.model_copy(
        update={"rollouts": [rollout.model_copy(update={"sequences": [long]})]}
    )
    raw = encode_group(large)
    assert raw[0] == 1
    assert len(raw) < 2000


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr(records, "MAX_UNPACKED_BYTES", 1_000_000)
    bomb = zstandard.ZstdCompressor().compress(b"\0" * 1_000_001)
    assert len(bomb) < 1000
    with pytest.raises(PayloadTooLarge, match="unpacked"):
        decode_ticket(b"\x01" + bomb)


def test_a_frame_that_hides_its_size_is_refused():
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    frame = compressor.compress(b"x" * 10) + compressor.flush()
    with pytest.raises(PayloadTooLarge):
        decode_ticket(b"\x01" + frame)


def test_a_record_over_the_limit_is_not_made(monkeypatch, make_group):
    monkeypatch.setattr(records, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(PayloadTooLarge, match="group t-1"):
        encode_group(make_group())


def test_nested_maps_do_not_exhaust_the_stack():
    deep = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(MalformedMessage):
        decode_ticket(b"\x00" + deep)


def test_a_newer_schema_is_named_not_guessed_at(make_ticket):
    fields = msgpack.unpackb(encode_ticket(make_ticket())[1:]) | {"schema_number": 99}
    with pytest.raises(UnknownSchema, match="99"):
        decode_ticket(b"\x00" + msgpack.packb(fields))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(number, make_group):
    with pytest.raises(MalformedMessage, match="not finite"):
        decode_group(encode_group(make_group(reward=number)))


def test_a_logprob_that_is_no_number_is_refused(make_group):
    raw = encode_group(make_group())
    packed = struct.pack("<f", -0.25)
    assert packed in raw
    with pytest.raises(MalformedMessage, match="not finite"):
        decode_group(raw.replace(packed, struct.pack("<f", float("nan"))))


def test_ids_that_do_not_fit_are_refused_when_packed(make_group):
    group = make_group()
    [rollout, _] = group.rollouts
    bad = rollout.sequences[0].model_copy(update={"token_ids": [-1, 6, 7, 8]})
    wrong = group.model_copy(update={"rollouts": [rollout.model_copy(update={"sequences": [bad]})]})
    with pytest.raises(MalformedMessage, match="packed"):
        encode_group(wrong)


def test_records_are_the_golden_bytes(make_ticket, make_group):
    """A change of the wire format shows as a change of these files."""
    group = make_group()
    group = group.model_copy(update={"rollouts": group.rollouts[:1]})
    golden_ticket = (GOLDEN / "ticket.record").read_bytes()
    golden_group = (GOLDEN / "group.record").read_bytes()
    assert (encode_ticket(make_ticket()), encode_group(group)) == (golden_ticket, golden_group)
    assert (decode_ticket(golden_ticket), decode_group(golden_group)) == (make_ticket(), group)
