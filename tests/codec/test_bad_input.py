"""Files that lie, one by one: each is a typed error that names the file and the reason."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deltawire.codec.anchor import iter_anchor
from deltawire.codec.container import MAX_HEADER_BYTES, Container, Section, write_container
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.digest import Digest, check_digests, digest_full
from deltawire.codec.encode import encode_delta
from deltawire.codec.patch import Layout, SparsePatch, check_patches
from deltawire.codec.positions import squeeze
from deltawire.codec.segment_file import Row
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import (
    DigestMismatch,
    LayoutMismatch,
    MalformedObject,
    UnknownSchema,
)
from deltawire.protocol.header import ObjectHeader

from .models import LiveBits, difference, header_of

LAYOUT = Layout([TensorSpec(name="w", shape=[100, 60], dtype="BF16")])
BEFORE = {"w": np.arange(0x3F00, 0x3F00 + 6000, dtype=np.uint16)}
AFTER = {"w": BEFORE["w"] + (np.arange(6000) % 3 == 0).astype(np.uint16)}
PATCHES = difference(BEFORE, AFTER, LAYOUT)


@pytest.fixture
def delta(tmp_path: Path) -> Callable[..., Path]:
    """Write a right delta, then change its parts."""

    def write(encoding: str = "compact", **changes: object) -> Path:
        path = tmp_path / f"{encoding}.safetensors"
        encode_delta(
            PATCHES, header_of(1), path, layout=LAYOUT, encoding=encoding, base=LiveBits(BEFORE)
        )
        container = Container(path)
        assert container.metadata["encoding"] == encoding
        metadata = container.metadata | changes.pop("metadata", {})
        sections = []
        for name, entry in container.entries.items():
            bits = container.read(name)
            shape = entry.shape
            if name in changes:
                bits = changes.pop(name)(bits)
                shape = (bits.size // entry.shape[1], *entry.shape[1:]) if shape[1:] else bits.shape
            sections.append(Section(name=name, dtype=entry.dtype, shape=shape, pieces=[bits]))
        sections += [
            Section(name=n, dtype="U8", shape=(len(body),), pieces=[body])
            for n, body in changes.items()
        ]
        write_container(path, sections, metadata)
        return path

    return write


def refused(path: Path, reason: str, error: type[Exception] = MalformedObject) -> None:
    with pytest.raises(error, match=reason) as caught:
        decode_delta(path, LAYOUT, LiveBits(BEFORE))
    assert path.name in str(caught.value)


def row_with(**fields: int) -> Callable[[np.ndarray], np.ndarray]:
    columns = list(Row.__dataclass_fields__)

    def change(table: np.ndarray) -> np.ndarray:
        for name, value in fields.items():
            table.view(np.int64)[columns.index(name)] = value
        return table

    return change


def test_a_header_longer_than_the_file_or_the_cap_is_refused_unread(tmp_path: Path) -> None:
    for length, reason in ((2**63, "a header of"), (MAX_HEADER_BYTES + 1, "in a file of 30")):
        (tmp_path / "f").write_bytes(length.to_bytes(8, "little") + b"{}" * 11)
        refused(tmp_path / "f", reason)
    with (tmp_path / "sparse").open("wb") as file:  # large on paper, nothing on disk
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    refused(tmp_path / "sparse", f"more than {MAX_HEADER_BYTES}")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"nonsense", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b"[1]", "not a JSON object"),
        (b'{"__metadata__": {"a": 1}}', "map of strings"),
        (b'{"w": {"dtype": "BF16", "shape": [1]}}', "expected dtype, shape and data_offsets"),
        (b'{"w": {"dtype": "BF16", "shape": [1.0], "data_offsets": [0, 2]}}', "wrong type"),
        (b'{"w": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]}}', "wrong type"),
        (b'{"w": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 2]}}', "unknown dtype"),
        (b'{"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 2]}}', "does not take bytes"),
        (b'{"w": {"dtype": "BF16", "shape": [1], "data_offsets": [2, 4]}}', "begins at 2"),
        (b'{"w": {"dtype": "U8", "shape": [99], "data_offsets": [0, 99]}}', "describes"),
    ],
)
def test_a_container_that_contradicts_itself_is_refused(
    header: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")

    refused(path, reason)


def test_what_a_file_calls_its_arrays_cannot_break_the_message(tmp_path: Path) -> None:
    header = json.dumps({"\ud800\x1b[31m" + "x" * 5000: 1}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(MalformedObject) as caught:
        Container(tmp_path / "f")

    str(caught.value).encode("ascii")
    assert len(str(caught.value)) <= 1000


def test_a_delta_of_another_run_or_kind_or_a_later_format_is_refused(
    delta: Callable[..., Path],
) -> None:
    refused(delta(metadata={"layout_digest": "0" * 64}), "this run has", LayoutMismatch)
    refused(delta(metadata={"total_elements": "7"}), "this run has", LayoutMismatch)
    refused(delta(metadata={"sparse": "False"}), "an anchor", LayoutMismatch)
    refused(delta(metadata={"encoding": "quantum"}), "unknown encoding", UnknownSchema)
    refused(delta(metadata={"format": "other"}), "unknown format", UnknownSchema)
    refused(delta(metadata={"model_version": "one"}), "header field")
    refused(delta(metadata={"num_changed": "7"}), "7 changes announced")


def test_a_seed_files_positions_are_checked(delta: Callable[..., Path]) -> None:
    def last_becomes(value: int) -> Callable[[np.ndarray], np.ndarray]:
        def change(bits: np.ndarray) -> np.ndarray:
            bits[-1] = value
            return bits

        return change

    refused(delta("seed", **{"w.indices": last_becomes(6000)}), "has 6000 elements")
    refused(delta("seed", **{"w.indices": last_becomes(2**31 + 5)}), "not sorted and unique")
    refused(delta("seed", **{"w.indices": last_becomes(3)}), "not sorted and unique")
    refused(delta("seed", **{"w.indices": lambda bits: bits[:-1]}), "indices for")
    refused(delta("seed", metadata={"changed_params": "[]"}), "changed_params and arrays differ")
    refused(delta("seed", metadata={"changed_params": '["v"]'}), "differ")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"begin": 1}, "no segment can be"),
        ({"end": 5999}, "no segment can be"),
        ({"changes": 0}, "impossible row"),
        ({"changes": 6001}, "impossible row"),
        ({"shift": 41}, "impossible row"),
        ({"coding": 2}, "impossible row"),
        ({"runs": 1}, "impossible row"),
        ({"whole": -1}, "impossible row"),
        ({"changes": 1999}, "."),
        ({"gap_bytes": 2**40}, "outside the array"),
        ({"exceptions": 3}, "."),
        ({"whole": 1}, "."),
    ],
)
def test_a_segment_row_that_cannot_be_is_refused(
    fields: dict[str, int], reason: str, delta: Callable[..., Path]
) -> None:
    refused(delta(segments=row_with(**fields)), reason)


def test_a_frame_that_unpacks_to_more_than_fits_is_refused_before_it_is_unpacked(
    delta: Callable[..., Path],
) -> None:
    bomb = np.frombuffer(squeeze(np.zeros(1 << 30, np.uint8)), np.uint8)
    assert bomb.size < 1 << 20

    def bombed(_: np.ndarray) -> np.ndarray:
        return bomb

    path = delta(gap=bombed, segments=row_with(gap_bytes=bomb.size))

    refused(path, f"declares {1 << 30} bytes")


def test_arrays_that_belong_to_nothing_are_refused(delta: Callable[..., Path]) -> None:
    refused(delta(extra=b"12345678"), "unknown arrays")
    refused(delta(sign=lambda bits: np.append(bits, np.uint8(0))), "bytes belong to segments")


def test_a_wrong_base_a_replay_and_a_wrong_end_fail_their_digest(tmp_path: Path) -> None:
    base, new = digest_full(BEFORE.items(), LAYOUT), digest_full(AFTER.items(), LAYOUT)
    path = tmp_path / "d"
    header = header_of(1, base_digest=str(base), new_digest=str(new))
    encode_delta(PATCHES, header, path, layout=LAYOUT, encoding="compact")
    patches = decode_delta(path, LAYOUT, LiveBits(BEFORE))

    def check(header: ObjectHeader, held: Digest) -> Digest:
        return check_digests(header, patches, LAYOUT, held=held, name="d")

    assert check(read_header(path), base) == new
    with pytest.raises(DigestMismatch, match="re-base on an anchor"):
        check(read_header(path), new)  # applied already
    with pytest.raises(DigestMismatch):
        check(header_of(1, base_digest=str(base), new_digest=str(base)), base)


def test_an_anchor_with_half_a_tensor_is_refused(tmp_path: Path) -> None:
    for name in ("w.top", "w.rest"):
        half = Section(name=name, dtype="U8", shape=(6000,), pieces=[bytes(6000)])
        write_container(tmp_path / "a", [half], {})
        with pytest.raises(MalformedObject, match="half of a packed tensor"):
            iter_anchor(tmp_path / "a", LAYOUT)


def test_patches_out_of_order_twice_or_of_other_bits_are_refused() -> None:
    layout = Layout([TensorSpec(name=n, shape=[5], dtype="BF16") for n in "ab"])

    def patch(name: str, width: type = np.uint16) -> SparsePatch:
        return SparsePatch(name=name, indices=np.array([1]), values=np.array([1], width))

    check_patches([patch("a"), patch("b")], layout, name="f")
    for wrong, error in (
        ([patch("b"), patch("a")], MalformedObject),
        ([patch("a"), patch("a")], MalformedObject),
        ([patch("c")], LayoutMismatch),
        ([patch("a", np.uint8)], LayoutMismatch),
    ):
        with pytest.raises(error, match="f: "):
            check_patches(wrong, layout, name="f")
    with pytest.raises(MalformedObject):
        SparsePatch(name="a", indices=np.array([1, 2]), values=np.array([1], np.uint16))


def test_a_digest_is_thirty_two_hex_digits() -> None:
    digest = digest_full(BEFORE.items(), LAYOUT)

    assert Digest.parse(str(digest)) == digest
    for wrong in ("", "0" * 31, "G" * 32, "F" * 32):
        with pytest.raises(MalformedObject):
            Digest.parse(wrong)
