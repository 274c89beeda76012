"""Patches onto live tensors: in place, wherever the memory lies, and back again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from deltawire.codec.apply import LiveTensors, gather, reverse, scatter
from deltawire.codec.bits import bits_of
from deltawire.codec.digest import digest_full, digest_tensors
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch

from .models import densities, difference, mutate, random_bits, seeds, specs, tensors_of

LAYOUT = Layout([TensorSpec(name="w", shape=[6, 4], dtype="BF16")])
PATCH = SparsePatch(
    name="w",
    indices=np.array([1, 4, 23], np.int32),
    values=np.array([0x3F80, 0x8000, 0x7FC1], np.uint16),
)


@given(specs=specs, seed=seeds, density=densities)
@settings(max_examples=60, deadline=None)
def test_what_was_applied_can_be_undone(specs: list, seed: int, density: float) -> None:
    layout, rng = Layout(specs), np.random.default_rng(seed)
    before = random_bits(layout, rng)
    after = mutate(before, layout, density, rng)
    tensors = tensors_of(before, layout)
    live = LiveTensors(tensors.items(), layout)
    bare = [
        SparsePatch(name=p.name, indices=p.indices, values=p.values)
        for p in difference(before, after, layout)
    ]

    staged = gather(live, bare)
    scatter(live, staged)
    assert all(np.array_equal(bits, after[name]) for name, bits in live.named_bits())
    assert digest_tensors(tensors.items(), layout) == digest_full(after.items(), layout)

    scatter(live, staged)  # absolute: twice does no harm
    scatter(live, reverse(staged))
    assert all(np.array_equal(bits, before[name]) for name, bits in live.named_bits())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6, 4, dtype=torch.bfloat16),
        torch.zeros(4, 6, dtype=torch.bfloat16).t(),
        torch.zeros(6, 8, dtype=torch.bfloat16)[:, ::2],
        torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16)),
    ],
    ids=["plain", "transposed", "strided", "parameter"],
)
def test_values_land_in_the_tensor_itself_whatever_its_strides(tensor: torch.Tensor) -> None:
    live = LiveTensors([("w", tensor)], LAYOUT)

    scatter(live, gather(live, [PATCH]))

    expected = np.zeros(24, np.uint16)
    expected[PATCH.indices] = PATCH.values
    assert np.array_equal(bits_of(tensor), expected)
    assert np.array_equal(live.gather("w", PATCH.indices), PATCH.values)
    assert np.array_equal(live.read("w", 1, 5), expected[1:5])
    live.write("w", np.arange(24, dtype=np.uint16))
    assert np.array_equal(bits_of(tensor), np.arange(24))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (None, "not in the model"),
        (torch.zeros(4, 6, dtype=torch.bfloat16), "expected"),
        (torch.zeros(6, 4), "expected"),
    ],
)
def test_a_model_of_another_layout_is_refused(tensor: torch.Tensor | None, reason: str) -> None:
    named = [] if tensor is None else [("w", tensor)]

    with pytest.raises(LayoutMismatch, match=reason):
        LiveTensors(named, LAYOUT)


def test_an_anchor_tensor_of_another_size_is_refused() -> None:
    live = LiveTensors([("w", torch.zeros(6, 4, dtype=torch.bfloat16))], LAYOUT)

    for wrong in (np.zeros(23, np.uint16), np.zeros(24, np.uint8)):
        with pytest.raises(LayoutMismatch, match="do not fit"):
            live.write("w", wrong)


def test_undo_needs_old_values() -> None:
    with pytest.raises(LayoutMismatch, match="gather them before the scatter"):
        reverse([PATCH])
