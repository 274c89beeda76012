"""Merging: one delta that does what several did."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.codec.merge import merge_deltas
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch

from .models import densities, difference, mutate, random_bits, seeds, specs


@given(specs=specs, seed=seeds, steps=st.lists(densities, min_size=1, max_size=7))
@settings(max_examples=100, deadline=None)
def test_a_merged_delta_is_the_difference_between_its_ends(
    specs: list, seed: int, steps: list[float]
) -> None:
    layout, rng = Layout(specs), np.random.default_rng(seed)
    first = now = random_bits(layout, rng)
    deltas = []
    for density in steps:
        after = mutate(now, layout, density, rng)
        deltas.append(difference(now, after, layout))
        now = after

    merged = merge_deltas(deltas, layout)

    expected = difference(first, now, layout)
    assert [patch.name for patch in merged] == [patch.name for patch in expected]
    for mine, truth in zip(merged, expected, strict=True):
        assert np.array_equal(mine.indices, truth.indices)
        assert mine.indices.dtype == truth.indices.dtype
        assert np.array_equal(mine.values, truth.values)
        assert np.array_equal(mine.old, truth.old)


def test_what_came_back_to_its_old_value_is_no_change() -> None:
    there, back = one_change(old=5, value=6), one_change(old=6, value=5)

    assert merge_deltas([[there], [back]], LAYOUT) == []


def test_deltas_that_do_not_follow_each_other_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="not based on the first"):
        merge_deltas([[one_change(old=5, value=6)], [one_change(old=7, value=8)]], LAYOUT)


def test_a_delta_without_old_values_is_refused() -> None:
    patch = one_change(old=5, value=6)
    bare = SparsePatch(name=patch.name, indices=patch.indices, values=patch.values)

    with pytest.raises(LayoutMismatch, match="gather them before merging"):
        merge_deltas([[patch], [bare]], LAYOUT)


LAYOUT = Layout([TensorSpec(name="w", shape=[10], dtype="BF16")])


def one_change(*, old: int, value: int) -> SparsePatch:
    return SparsePatch(
        name="w",
        indices=np.array([3], np.int32),
        values=np.array([value], np.uint16),
        old=np.array([old], np.uint16),
    )
