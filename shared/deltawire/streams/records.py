"""Records on the streams: tickets and groups <-> bytes.

A record is one flag byte and a msgpack map, zstd-compressed above a size. The long lists of a group
travel as packed little-endian arrays: token ids and sampled-from ids as uint32, masks as uint8,
logprobs as float32 (engines compute them so), token rewards as float64. The schema number stands in
the map and, beside it, in a field of the stream entry, so that it can be judged without unpacking.
Whatever arrives is untrusted: sizes are bounded before memory is taken, and nothing but a valid
record comes out.
"""

import array
import asyncio
import math
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, TypeVar

import msgpack
import zstandard
from pydantic import ValidationError

from deltawire.protocol.errors import MalformedMessage, PayloadTooLarge, UnknownSchema
from deltawire.protocol.rollouts import ROLLOUT_SCHEMA, Rollout, RolloutGroup, Sequence, Ticket
from deltawire.protocol.wire_model import WireModel

MAX_RECORD_BYTES = 64 * 1024 * 1024
"""Of one record on the wire. Eight rollouts of 32k tokens take about 2.5 MB."""
MAX_UNPACKED_BYTES = 4 * MAX_RECORD_BYTES
"""Of one record after decompression."""
COMPRESS_ABOVE_BYTES = 1024
"""Smaller records gain nothing from zstd."""

_LONG_TOKENS, _LONG_BYTES = 32_000, 128_000
"""From here on packing takes milliseconds; a thread costs a part of one."""
_PLAIN, _ZSTD = b"\x00", b"\x01"
_ZSTD_LEVEL = 1
_NO_ARRAYS: dict[str, Any] = {
    "token_ids": [],
    "loss_mask": [],
    "logprobs": [],
    "token_rewards": None,
    "sampling_mask": None,
    "routed_experts": None,
}
_SEQUENCES = {"rollouts": {"__all__": {"sequences"}}}

Record = TypeVar("Record", bound=WireModel)


def encode_ticket(ticket: Ticket) -> bytes:
    """A ticket as bytes. Raises PayloadTooLarge."""
    return _seal(ticket.model_dump(), name=f"ticket {ticket.ticket_id}")


def decode_ticket(raw: bytes) -> Ticket:
    """The inverse. Raises MalformedMessage, UnknownSchema or PayloadTooLarge."""
    return _validated(Ticket, _opened(raw), raw)


def encode_group(group: RolloutGroup) -> bytes:
    """A group as bytes. Raises PayloadTooLarge, and MalformedMessage for ids outside uint32."""
    fields = group.model_dump(exclude=_SEQUENCES)
    try:
        for packed, rollout in zip(fields["rollouts"], group.rollouts, strict=True):
            packed["sequences"] = [_packed_sequence(sequence) for sequence in rollout.sequences]
    except (OverflowError, ValueError) as error:
        raise MalformedMessage(f"group {group.group_id} cannot be packed: {error}") from error
    return _seal(fields, name=f"group {group.group_id}")


def decode_group(raw: bytes) -> RolloutGroup:
    """The inverse. Raises MalformedMessage (also for a reward or logprob that is not finite),
    UnknownSchema or PayloadTooLarge."""
    fields = _opened(raw)
    try:
        for rollout in fields["rollouts"]:
            rollout["sequences"] = [_unpacked_sequence(packed) for packed in rollout["sequences"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage(
            f"group with a sequence we cannot read: {error!r}", raw=raw
        ) from error
    group = _validated(RolloutGroup, fields, raw)
    for rollout in group.rollouts:
        _check_finite(rollout, raw)
    return group


async def encoded(group: RolloutGroup) -> bytes:
    """`encode_group`, beside the event loop when it takes long."""
    tokens = sum(len(s.token_ids) for rollout in group.rollouts for s in rollout.sequences)
    if tokens < _LONG_TOKENS:
        return encode_group(group)
    return await asyncio.to_thread(encode_group, group)


async def decoded(raw: bytes) -> RolloutGroup:
    """`decode_group`, beside the event loop when it takes long."""
    if len(raw) < _LONG_BYTES:
        return decode_group(raw)
    return await asyncio.to_thread(decode_group, raw)


def _seal(fields: dict[str, Any], *, name: str) -> bytes:
    plain: bytes = msgpack.packb(fields)
    if len(plain) > MAX_UNPACKED_BYTES:
        raise PayloadTooLarge(f"{name}: {len(plain)} bytes, at most {MAX_UNPACKED_BYTES} unpacked")
    if len(plain) <= COMPRESS_ABOVE_BYTES:
        return _PLAIN + plain
    raw = _ZSTD + zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(plain)
    if len(raw) > MAX_RECORD_BYTES:
        raise PayloadTooLarge(f"{name}: {len(raw)} bytes, at most {MAX_RECORD_BYTES} may travel")
    return raw


def _opened(raw: bytes) -> dict[str, Any]:
    """The map inside a record, its schema number checked."""
    if len(raw) > MAX_RECORD_BYTES:
        raise PayloadTooLarge(
            f"a record of {len(raw)} bytes, at most {MAX_RECORD_BYTES} may travel"
        )
    plain = _decompressed(raw) if raw[:1] == _ZSTD else raw[1:]
    try:
        fields = msgpack.unpackb(plain)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {error!r}", raw=raw) from error
    if raw[:1] not in (_PLAIN, _ZSTD) or not isinstance(fields, dict):
        raise MalformedMessage("a record is a flag byte and a msgpack map", raw=raw)
    check_schema(fields.get("schema_number"))
    return fields


def check_schema(number: object) -> None:
    """Raises UnknownSchema for any number but ours."""
    if number != ROLLOUT_SCHEMA:
        raise UnknownSchema(f"record of schema {number!r}; this version reads {ROLLOUT_SCHEMA}")


def check_belongs(ticket_id: str, group: RolloutGroup) -> None:
    """A group answers the ticket it was claimed for. Raises MalformedMessage."""
    if group.group_id != ticket_id:
        raise MalformedMessage(f"group {group.group_id!r} does not answer ticket {ticket_id!r}")


def _decompressed(raw: bytes) -> bytes:
    """zstd with the announced size checked first: a small bomb must not become a large one."""
    frame = raw[1:]
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > MAX_UNPACKED_BYTES:
            raise PayloadTooLarge(
                f"a record of {size} bytes unpacked, at most {MAX_UNPACKED_BYTES}"
            )
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=MAX_UNPACKED_BYTES)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"not zstd: {error}", raw=raw) from error


def _validated(kind: type[Record], fields: dict[str, Any], raw: bytes) -> Record:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise MalformedMessage(f"not a {kind.__name__}: {error}", raw=raw) from error


def _check_finite(rollout: Rollout, raw: bytes) -> None:
    numbers = [rollout.reward]
    for sequence in rollout.sequences:
        # A sum of float32 logprobs is finite exactly when all of them are.
        numbers += [sequence.reward, sum(sequence.logprobs), *(sequence.token_rewards or ())]
    if not all(map(math.isfinite, numbers)):
        raise MalformedMessage(
            f"rollout {rollout.rollout_id}: a reward or logprob is not finite", raw=raw
        )


def _packed_sequence(sequence: Sequence) -> dict[str, Any]:
    mask, experts = sequence.sampling_mask, sequence.routed_experts
    return {
        "agent": sequence.agent,
        "token_ids": _packed("I", sequence.token_ids),
        "loss_mask": bytes(sequence.loss_mask),
        "logprobs": _packed("f", sequence.logprobs),
        "spans": [span.model_dump() for span in sequence.spans],
        "turns": [turn.model_dump() for turn in sequence.turns],
        "reward": sequence.reward,
        "token_rewards": None
        if sequence.token_rewards is None
        else _packed("d", sequence.token_rewards),
        "sampling_mask": None if mask is None else _packed_ragged(mask),
        "routed_experts": None if experts is None else [_packed_ragged(token) for token in experts],
    }


def _unpacked_sequence(packed: Mapping[str, Any]) -> Sequence:
    """Raises ValueError (as pydantic does) for one that makes no sense.

    Long lists come out of typed arrays, so their elements need no looking at: they are put in after
    the rest was validated, which takes half the time.
    """
    rewards, mask, experts = (
        packed["token_rewards"],
        packed["sampling_mask"],
        packed["routed_experts"],
    )
    arrays = {
        "token_ids": _unpacked("I", packed["token_ids"]),
        "loss_mask": list(packed["loss_mask"]),
        "logprobs": _unpacked("f", packed["logprobs"]),
    }
    lengths = [len(values) for values in arrays.values()]
    if len(set(lengths)) != 1 or max(arrays["loss_mask"], default=0) > 1:
        raise ValueError(f"ids, mask (of 0 and 1) and logprobs have the lengths {lengths}")
    rest = Sequence.model_validate({**packed, **_NO_ARRAYS})
    return rest.model_copy(
        update={
            **arrays,
            "token_rewards": None if rewards is None else _unpacked("d", rewards),
            "sampling_mask": None if mask is None else _unpacked_ragged(mask),
            "routed_experts": None
            if experts is None
            else [_unpacked_ragged(token) for token in experts],
        }
    )


_TypeCode = Literal["I", "f", "d"]


def _packed(code: _TypeCode, values: list[int] | list[float]) -> bytes:
    packed = array.array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(code: _TypeCode, raw: bytes) -> list[Any]:
    unpacked = array.array(code)
    unpacked.frombytes(raw)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def _packed_ragged(rows: list[list[int]]) -> list[bytes]:
    """[length of each row], [all values], each packed."""
    return [_packed("I", [len(row) for row in rows]), _packed("I", list(chain.from_iterable(rows)))]


def _unpacked_ragged(packed: list[bytes]) -> list[list[int]]:
    lengths, values = (_unpacked("I", part) for part in packed)
    if sum(lengths) != len(values):
        raise ValueError(f"rows of {sum(lengths)} values in all, {len(values)} came")
    rows, start = [], 0
    for length in lengths:
        rows.append(values[start : start + length])
        start += length
    return rows
