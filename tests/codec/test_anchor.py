"""Anchors: plain, packed and sharded; what comes back is what went in."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from deltawire.codec.anchor import iter_anchor, shard_names, write_anchor, write_anchor_shards
from deltawire.codec.bits import BitArray, bits_of
from deltawire.codec.decode import read_header
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch, MalformedObject

from .models import header_of, random_bits, seeds, specs, tensors_of


@given(specs=specs, seed=seeds, packed=st.booleans(), max_shard_bytes=st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_every_bit_comes_back(specs: list, seed: int, packed: bool, max_shard_bytes: int) -> None:
    layout = Layout(specs)
    bits = random_bits(layout, np.random.default_rng(seed))
    with TemporaryDirectory() as folder:
        paths = write_anchor_shards(
            bits.items(),
            header_of(3),
            lambda number, of: Path(folder) / f"{number}-of-{of}.safetensors",
            layout=layout,
            max_shard_bytes=max_shard_bytes,
            packed=packed,
        )
        found = dict(iter_anchor(paths, layout))

    assert list(found) == list(layout)
    assert all(np.array_equal(found[name], bits[name]) for name in layout)


def test_a_plain_anchor_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    layout = Layout([TensorSpec(name="a", shape=[3, 2], dtype="BF16")])
    bits = random_bits(layout, np.random.default_rng(0))
    write_anchor(bits.items(), header_of(0), tmp_path / "a.safetensors", layout=layout)

    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        tensor = file.get_tensor("a")
        assert file.metadata()["sparse"] == "False"

    assert tensor.shape == (3, 2)
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(bits_of(tensor), bits["a"])


def test_weights_like_a_models_pack_by_a_third(tmp_path: Path) -> None:
    layout, bits = like_a_model("BF16")
    path = tmp_path / "packed"

    size = write_anchor(bits.items(), header_of(0), path, layout=layout, packed=True)

    assert read_header(path).encoding == "packed"
    assert layout.nbytes / size > 1.4
    assert np.array_equal(dict(iter_anchor(path, layout))["w"], bits["w"])


def test_bits_without_order_are_kept_plain_in_a_packed_anchor(tmp_path: Path) -> None:
    layout = Layout([TensorSpec(name="w", shape=[100, 100], dtype="BF16")])
    bits = random_bits(layout, np.random.default_rng(0))

    size = write_anchor(bits.items(), header_of(0), tmp_path / "p", layout=layout, packed=True)

    assert size < layout.nbytes + 2000
    assert np.array_equal(dict(iter_anchor(tmp_path / "p", layout))["w"], bits["w"])


def test_shards_are_cut_between_tensors_in_layout_order() -> None:
    layout = Layout([TensorSpec(name=n, shape=[10], dtype="BF16") for n in "abcd"])

    assert shard_names(layout, 45) == [["a", "b"], ["c", "d"]]
    assert shard_names(layout, 1) == [["a"], ["b"], ["c"], ["d"]]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    layout = Layout([TensorSpec(name=n, shape=[10], dtype="BF16") for n in "ab"])
    bits = random_bits(layout, np.random.default_rng(0))
    paths = write_anchor_shards(
        bits.items(),
        header_of(0),
        lambda number, of: tmp_path / f"{number}",
        layout=layout,
        max_shard_bytes=1,
    )

    with pytest.raises(LayoutMismatch, match="1 tensors missing: \\['b'\\]"):
        iter_anchor(paths[:1], layout)
    with pytest.raises(MalformedObject, match="stands in 1 too"):
        iter_anchor([paths[0], paths[0], paths[1]], layout)


def test_an_anchor_of_another_layout_is_refused_before_any_tensor_is_given(
    tmp_path: Path,
) -> None:
    layout = Layout([TensorSpec(name="a", shape=[4, 5], dtype="BF16")])
    bits = random_bits(layout, np.random.default_rng(0))
    write_anchor(bits.items(), header_of(0), tmp_path / "a", layout=layout)

    for other in (
        TensorSpec(name="a", shape=[5, 4], dtype="BF16"),
        TensorSpec(name="a", shape=[4, 5], dtype="F16"),
        TensorSpec(name="b", shape=[4, 5], dtype="BF16"),
    ):
        with pytest.raises(LayoutMismatch):
            iter_anchor(tmp_path / "a", Layout([other]))


def test_tied_weights_are_stored_once() -> None:
    embedding = torch.zeros(8, 4, dtype=torch.bfloat16)
    named = [("embed", embedding), ("head", embedding), ("norm", torch.ones(4))]

    layout, tied = Layout.of_tensors(named)

    assert list(layout) == ["embed", "norm"]
    assert tied == {"head": "embed"}
    assert layout["norm"].dtype == "BF16"


def like_a_model(dtype: str) -> tuple[Layout, dict[str, BitArray]]:
    """Normal weights, as an initialised or trained layer has."""
    layout = Layout([TensorSpec(name="w", shape=[300, 400], dtype=dtype)])
    weights = torch.randn(300, 400, generator=torch.Generator().manual_seed(0)) * 0.02
    return layout, {"w": bits_of(weights.to(torch.bfloat16))}


def test_a_models_tensors_survive_the_round_trip_as_tensors(tmp_path: Path) -> None:
    layout, bits = like_a_model("BF16")
    write_anchor(bits.items(), header_of(0), tmp_path / "a", layout=layout, packed=True)

    back = tensors_of(dict(iter_anchor(tmp_path / "a", layout)), layout)["w"]

    assert torch.equal(back, tensors_of(bits, layout)["w"])
