"""The front door: which encoding is written, and what the report and header say."""

from pathlib import Path

import numpy as np
import pytest

from deltawire.codec.bits import BitArray
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.encode import Encoding, encode_delta, worth_classes
from deltawire.codec.inspect import STEP_BOUNDS, histogram, inspect_delta
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch, UnknownSchema

from .models import LiveBits, difference, header_of

LAYOUT = Layout(
    [
        TensorSpec(name="a", shape=[200, 100], dtype="BF16"),
        TensorSpec(name="b", shape=[500], dtype="F32"),
    ]
)
BEFORE: dict[str, BitArray] = {
    "a": np.resize(np.arange(0x3000, 0x4000, dtype=np.uint16), 20_000),
    "b": np.full(500, 0x3F800000, np.uint32),
}


def step(every: int, by: int = 1) -> list[SparsePatch]:
    after = {name: bits.copy() for name, bits in BEFORE.items()}
    for bits in after.values():
        bits[::every] += bits.dtype.type(by)
    return difference(BEFORE, after, LAYOUT)


@pytest.mark.parametrize(
    ("asked", "every", "written"),
    [
        ("auto", 40, "compact"),
        ("compact", 40, "compact"),
        ("classes", 40, "classes"),
        ("absolute", 40, "compact"),
        ("seed", 40, "seed"),
        ("auto", 9_999, "seed"),
        ("raw", 40, "raw"),
        ("gap_delta", 40, "gap_delta"),
    ],
)
def test_an_encoding_is_written_as_asked_unless_seed_is_smaller(
    asked: Encoding, every: int, written: str, tmp_path: Path
) -> None:
    path = tmp_path / "d"
    patches = step(every)

    report = encode_delta(
        patches, header_of(1), path, layout=LAYOUT, encoding=asked, base=LiveBits(BEFORE)
    )

    assert report.encoding == read_header(path).encoding == written
    assert report.bytes == path.stat().st_size
    assert report.header.num_changed == sum(patch.changed for patch in patches)
    assert not report.larger_than_anchor
    found = decode_delta(path, LAYOUT, LiveBits(BEFORE))
    assert [p.values.tolist() for p in found] == [p.values.tolist() for p in patches]


def test_no_encoding_is_larger_than_seed(tmp_path: Path) -> None:
    for every in (1, 2, 7, 100, 3000, 30_000):
        sizes = {
            encoding: encode_delta(
                step(every, by=12345),
                header_of(1),
                tmp_path / "d",
                layout=LAYOUT,
                encoding=encoding,
                base=LiveBits(BEFORE),
            ).bytes
            for encoding in ("seed", "auto", "compact", "absolute", "classes")
        }
        assert max(sizes.values()) == sizes["seed"]


def test_a_delta_larger_than_the_weights_says_so(tmp_path: Path) -> None:
    report = encode_delta(step(1), header_of(1), tmp_path / "d", layout=LAYOUT, encoding="seed")

    assert report.larger_than_anchor
    assert report.anchor_bytes == 20_000 * 2 + 500 * 4


def test_an_absolute_file_needs_no_base(tmp_path: Path) -> None:
    encode_delta(step(40), header_of(1), tmp_path / "d", layout=LAYOUT, encoding="absolute")

    found = decode_delta(tmp_path / "d", LAYOUT)

    assert [p.values.tolist() for p in found] == [p.values.tolist() for p in step(40)]


def test_classes_need_the_base_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="needs the base weights"):
        encode_delta(step(40), header_of(1), tmp_path / "d", layout=LAYOUT, encoding="classes")
    with pytest.raises(UnknownSchema, match="known are auto, seed, compact"):
        encode_delta(step(40), header_of(1), tmp_path / "d", layout=LAYOUT, encoding="best")


def test_auto_takes_classes_only_where_the_link_is_slower_than_a_walk_over_the_base() -> None:
    header = header_of(1, num_changed=5_000_000)
    large = Layout([TensorSpec(name="w", shape=[1_000_000_000], dtype="BF16")])

    assert not worth_classes(header, large, None)
    assert not worth_classes(header, large, 100e6)
    assert worth_classes(header, large, 0.2e6)


def test_a_compact_file_tells_how_far_weights_moved_without_its_base(tmp_path: Path) -> None:
    encode_delta(step(40, by=3), header_of(1), tmp_path / "d", layout=LAYOUT, encoding="compact")

    tensors = inspect_delta(tmp_path / "d", LAYOUT)

    assert [(t.name, t.changed, t.elements) for t in tensors] == [
        ("a", 500, 20_000),
        ("b", 13, 500),
    ]
    assert tensors[0].density == 500 / 20_000
    bars = [0] * (len(STEP_BOUNDS) + 1)
    bars[2] = 500  # three units: the bar up to four
    bars[-1] = 13  # so few that they were stored whole
    assert histogram(tensors) == tuple(bars)


def test_a_seed_file_tells_no_distances_without_its_base(tmp_path: Path) -> None:
    encode_delta(step(40, by=3), header_of(1), tmp_path / "d", layout=LAYOUT, encoding="seed")

    assert histogram(inspect_delta(tmp_path / "d", LAYOUT)) is None
    assert histogram(inspect_delta(tmp_path / "d", LAYOUT, LiveBits(BEFORE))) is not None
