"""Bytes on the wire: TRL's formats, written by hand, and ours, which must stay readable."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from deltawire.codec.anchor import iter_anchor, write_anchor
from deltawire.codec.bits import BitArray
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.encode import Encoding, encode_delta
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import UnknownSchema

from .models import LiveBits, difference, header_of

GOLDEN = Path(__file__).parents[1] / "golden"
TRL = Layout(
    [
        TensorSpec(name="layers.0.weight", shape=[700, 100], dtype="BF16"),
        TensorSpec(name="norm.weight", shape=[4], dtype="BF16"),
    ]
)
OURS = Layout(
    [
        TensorSpec(name="embed", shape=[100, 50], dtype="BF16"),
        TensorSpec(name="half", shape=[300], dtype="F16"),
        TensorSpec(name="tiny", shape=[9], dtype="F8_E4M3"),
    ]
)
"""Do not change: golden files were written for it."""


@pytest.mark.parametrize(
    ("file", "encoding", "positions"),
    [
        ("trl_v0_delta", "seed", [0, 5, 69999]),
        ("trl_v1_raw", "raw", [0, 5, 69999]),
        ("trl_v1_gap_u32", "gap_delta", [0, 5, 69999]),
        ("trl_v1_gap_u16", "gap_delta", [0, 5, 60006]),
    ],
)
def test_a_delta_of_trl_is_read(file: str, encoding: str, positions: list[int]) -> None:
    path = GOLDEN / f"{file}.safetensors"

    header, patches = read_header(path), decode_delta(path, TRL)

    assert (header.model_version, header.base_version, header.encoding) == (7, None, encoding)
    assert [patch.name for patch in patches] == ["layers.0.weight"]
    assert patches[0].indices.tolist() == positions
    assert patches[0].values.tolist() == [0x3F80, 0x8000, 0x4000]


def test_an_anchor_of_trl_is_read() -> None:
    path = GOLDEN / "trl_v0_anchor.safetensors"
    layout = Layout([TensorSpec(name="norm.weight", shape=[4], dtype="BF16")])

    assert not read_header(path).sparse
    assert dict(iter_anchor(path, layout))["norm.weight"].tolist() == [0x3F80, 0x4000, 0, 0x8000]


def test_what_only_a_gpu_library_can_read_is_refused_by_name() -> None:
    with pytest.raises(UnknownSchema, match="nvcomp_cascaded"):
        decode_delta(GOLDEN / "trl_v1_nvcomp.safetensors", TRL)


@pytest.mark.parametrize(
    ("file", "encoding"), [("trl_v1_raw", "raw"), ("trl_v1_gap_u32", "gap_delta")]
)
def test_what_we_write_for_trl_holds_the_same_arrays(
    file: str, encoding: Encoding, tmp_path: Path
) -> None:
    patch = SparsePatch(
        name="layers.0.weight",
        indices=np.array([0, 5, 69999], np.int32),
        values=np.array([0x3F80, 0x8000, 0x4000], np.uint16),
    )
    mine = tmp_path / "mine.safetensors"

    encode_delta([patch], header_of(7), mine, layout=TRL, encoding=encoding)

    truth = load_file(GOLDEN / f"{file}.safetensors")
    for name, tensor in load_file(mine).items():
        assert tensor.dtype == truth[name].dtype
        assert tensor.tolist() == truth[name].tolist()


def test_a_seed_file_reads_as_trls_v0(tmp_path: Path) -> None:
    """The v0 reader takes names from changed_params, then the two arrays."""
    patches, _ = golden_step()
    path = tmp_path / "seed.safetensors"
    encode_delta(patches, header_of(1), path, layout=OURS, encoding="seed")

    body = path.read_bytes()
    size = int.from_bytes(body[:8], "little")
    metadata = json.loads(body[8 : 8 + size])["__metadata__"]
    arrays = load_file(path)

    assert metadata["sparse"] == "True"
    for name, patch in zip(json.loads(metadata["changed_params"]), patches, strict=True):
        assert arrays[f"{name}.indices"].tolist() == patch.indices.tolist()
        assert arrays[f"{name}.values"].numel() == patch.changed


@pytest.mark.parametrize("encoding", ["seed", "compact", "classes"])
def test_a_file_of_this_format_version_is_still_read(encoding: Encoding) -> None:
    patches, before = golden_step()

    found = decode_delta(GOLDEN / f"{encoding}.safetensors", OURS, LiveBits(before))

    for mine, truth in zip(found, patches, strict=True):
        assert mine.indices.tolist() == truth.indices.tolist()
        assert mine.values.tolist() == truth.values.tolist()


def test_a_packed_anchor_of_this_format_version_is_still_read() -> None:
    _, before = golden_step()

    found = dict(iter_anchor(GOLDEN / "packed.safetensors", OURS))

    assert all(np.array_equal(found[name], before[name]) for name in OURS)


def test_seed_files_are_written_as_they_were(tmp_path: Path) -> None:
    patches, _ = golden_step()
    path = tmp_path / "seed.safetensors"
    encode_delta(patches, header_of(1), path, layout=OURS, encoding="seed")

    assert path.read_bytes() == (GOLDEN / "seed.safetensors").read_bytes()


def golden_step() -> tuple[list[SparsePatch], dict[str, BitArray]]:
    """A step of pure arithmetic: three elements in ten change, by a unit, a few, or altogether."""
    before: dict[str, BitArray] = {}
    after: dict[str, BitArray] = {}
    for name, tensor in OURS.items():
        place = np.arange(tensor.numel, dtype=np.int64)
        line = 0x3F00 + place * 40503 % 251
        move = np.array([1, -1, 1, -1, 3, -1, 1, 1000, -1, 1])[place * 7919 % 10]
        hit = place * 104729 % 31 < 9
        before[name] = line.astype(tensor.bits)
        after[name] = (line + np.where(hit, move, 0)).astype(tensor.bits)
    return difference(before, after, OURS), before


def write_golden() -> None:
    """Run by hand once per format version: python -c 'import ...; write_golden()'."""
    patches, before = golden_step()
    for encoding in ("seed", "compact", "classes"):
        encode_delta(
            patches,
            header_of(1),
            GOLDEN / f"{encoding}.safetensors",
            layout=OURS,
            encoding=encoding,
            base=LiveBits(before),
        )
    write_anchor(
        before.items(), header_of(0), GOLDEN / "packed.safetensors", layout=OURS, packed=True
    )
