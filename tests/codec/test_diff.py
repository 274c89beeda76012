"""The shadow: what it finds, in which order things may happen, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.codec import diff_device, kernels
from deltawire.codec.bits import bits_of
from deltawire.codec.diff import Shadow, published_bits
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch

from .models import densities, difference, mutate, random_bits, seeds, specs, tensors_of

WAYS = {
    "numba": {"loops": kernels.load()},
    "numpy": {"loops": kernels.load(compiled=False)},
    "device": {"on_device": True},
}


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_device, "BUCKET_ELEMENTS", 300)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("way", list(WAYS))
@given(
    specs=specs,
    seed=seeds,
    steps=st.lists(densities, min_size=1, max_size=3),
    threads=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=30, deadline=None)
def test_every_way_finds_exactly_what_differs(
    way: str, specs: list, seed: int, steps: list[float], threads: int | None
) -> None:
    layout, rng = Layout(specs), np.random.default_rng(seed)
    before = random_bits(layout, rng)
    shadow = Shadow.of(tensors_of(before, layout).items(), layout, **WAYS[way])

    for density in steps:
        after = mutate(before, layout, density, rng)
        found = shadow.diff(tensors_of(after, layout).items(), threads=threads)
        assert_same(found, difference(before, after, layout))
        before = after

    assert all(np.array_equal(bits, before[name]) for name, bits in shadow.named_bits())


@pytest.mark.parametrize("way", list(WAYS))
@given(seed=seeds)
@settings(max_examples=25, deadline=None)
def test_masters_of_any_bits_are_rounded_alike(way: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = Layout([TensorSpec(name="w", shape=[3, 97], dtype="BF16")])
    before, after = (
        torch.from_numpy(rng.integers(0, 2**32, 291, dtype=np.uint32).view(np.float32))
        .clone()
        .view(3, 97)
        for _ in range(2)
    )
    after.view(-1)[::2] = before.view(-1)[::2]
    shadow = Shadow.of([("w", before)], layout, **WAYS[way])

    found = shadow.diff([("w", after)])

    published = {k: {"w": published_bits(t, "BF16").reshape(-1)} for k, t in
                 (("before", before), ("after", after))}  # fmt: skip
    assert_same(found, difference(published["before"], published["after"], layout))


def test_finite_masters_round_as_torch_does() -> None:
    weights = torch.randn(10_000, generator=torch.Generator().manual_seed(0))

    assert np.array_equal(published_bits(weights, "BF16"), bits_of(weights.to(torch.bfloat16)))


def test_masters_may_be_published_as_fp16_or_whole() -> None:
    for dtype in ("F16", "F32"):
        layout = Layout([TensorSpec(name="w", shape=[1000], dtype=dtype)])
        shadow = Shadow.of([("w", torch.zeros(1000))], layout)
        found = shadow.diff([("w", torch.linspace(-1, 1, 1000))])
        assert found[0].changed == 1000
        assert found[0].values.itemsize == {"F16": 2, "F32": 4}[dtype]


def test_a_denser_diff_than_expected_only_makes_more_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deltawire.codec.diff.ROOM", 64)
    layout = Layout([TensorSpec(name="w", shape=[5000], dtype="BF16")])
    shadow = Shadow.of([("w", torch.zeros(5000))], layout, loops=kernels.load())

    found = shadow.diff([("w", torch.ones(5000))])

    assert np.array_equal(found[0].indices, np.arange(5000))


class Wrapped(torch.Tensor):
    """A type of its own, as quantisers and parallel layers make them."""


@pytest.mark.parametrize("way", list(WAYS))
def test_weights_may_lie_in_any_order_and_be_of_any_tensor_type(way: str) -> None:
    layout = Layout([TensorSpec(name=n, shape=[70, 90], dtype="BF16") for n in ("a", "b", "c")])
    zero = torch.zeros(70, 90, dtype=torch.bfloat16)
    moved = zero.clone()
    moved[3, 5] = moved[60, 0] = 1.0
    shadow = Shadow.of([(name, zero) for name in layout], layout, **WAYS[way])
    across = moved.t().contiguous().t()
    found = shadow.diff([("a", across), ("b", moved.as_subclass(Wrapped)),
                         ("c", torch.nn.Parameter(moved))])  # fmt: skip

    assert [patch.indices.tolist() for patch in found] == [[3 * 90 + 5, 60 * 90]] * 3


def test_bits_that_are_not_the_layouts_are_refused_and_locked_ones_copied() -> None:
    layout, (zero, one, _) = three_versions()
    for wrong in ({}, {"w": np.zeros(11, np.uint16)}, {"w": np.zeros(12, np.uint8)}):
        with pytest.raises(LayoutMismatch, match="12 elements of uint16"):
            Shadow(layout, wrong)
    locked = bits_of(zero[0][1].to(torch.bfloat16)).copy()
    locked.flags.writeable = False

    found = Shadow(layout, {"w": locked}).diff(one)

    assert_same(found, Shadow.of(zero, layout).diff(one))
    assert np.array_equal(locked, bits_of(zero[0][1].to(torch.bfloat16)))


@pytest.mark.parametrize("way", list(WAYS))
def test_a_failed_version_is_found_again_with_all_that_came_after(way: str) -> None:
    layout, (zero, one, two) = three_versions()
    shadow = Shadow.of(zero, layout, **WAYS[way])
    shadow.diff(one)
    shadow.diff(two)
    assert shadow.pending == 2

    shadow.rollback()

    assert shadow.pending == 0
    assert_same(shadow.diff(two), Shadow.of(zero, layout).diff(two))


def test_a_committed_version_is_not_undone() -> None:
    layout, (zero, one, two) = three_versions()
    shadow = Shadow.of(zero, layout)
    shadow.diff(one)
    shadow.commit()
    shadow.diff(two)

    shadow.rollback()

    assert_same(shadow.diff(two), Shadow.of(one, layout).diff(two))


def test_the_base_of_a_pending_diff_is_seen_through_later_ones() -> None:
    layout, (zero, one, two) = three_versions()
    shadow = Shadow.of(zero, layout)
    first, second = shadow.diff(one), shadow.diff(two)
    base = dict(Shadow.of(zero, layout).named_bits())["w"]
    middle = dict(Shadow.of(one, layout).named_bits())["w"]
    some = np.array([0, 5, 7], np.int32)

    assert np.array_equal(shadow.before(first).read("w", 3, 11), base[3:11])
    assert np.array_equal(shadow.before(first).gather("w", some), base[some])
    assert np.array_equal(shadow.before(second).read("w", 0, 12), middle)
    shadow.commit()
    with pytest.raises(LayoutMismatch, match="no longer pending"):
        shadow.before(first).read("w", 0, 1)


def test_a_tensor_that_is_missing_twice_or_other_is_refused_and_nothing_moves() -> None:
    layout, (zero, one, _) = three_versions()
    shadow = Shadow.of(zero, layout)

    for wrong, reason in (
        ([], "not given"),
        ([*one, *one], "given twice"),
        ([("w", torch.zeros(3, 4))], "shape"),
        ([("w", torch.zeros(12, dtype=torch.int32))], "cannot be published"),
    ):
        with pytest.raises(LayoutMismatch, match=reason):
            shadow.diff(wrong)

    assert shadow.pending == 0
    assert_same(shadow.diff(one), Shadow.of(zero, layout).diff(one))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_a_gpu_are_compared_there() -> None:
    layout, (zero, one, _) = three_versions()
    shadow = Shadow.of([("w", zero[0][1].cuda())], layout)

    assert_same(shadow.diff([("w", one[0][1].cuda())]), Shadow.of(zero, layout).diff(one))


def three_versions() -> tuple[Layout, list[list[tuple[str, torch.Tensor]]]]:
    """Twelve elements: one changes in each version, one changes and comes back."""
    layout = Layout([TensorSpec(name="w", shape=[12], dtype="BF16")])
    zero, one, two = (torch.arange(12.0) for _ in range(3))
    one[[5, 7]] = 99.0
    two[3], two[5] = -1.0, 5.5
    return layout, [[("w", zero)], [("w", one)], [("w", two)]]


def assert_same(found: list[SparsePatch], expected: list[SparsePatch]) -> None:
    assert [patch.name for patch in found] == [patch.name for patch in expected]
    for mine, truth in zip(found, expected, strict=True):
        assert np.array_equal(mine.indices, truth.indices)
        assert mine.indices.dtype == truth.indices.dtype
        assert np.array_equal(mine.values, truth.values)
        assert mine.old is not None
        assert np.array_equal(mine.old, truth.old)
