"""Compact and classes files, even where seed is smaller, over every dtype and both kernels."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.codec import kernels, segments
from deltawire.codec.bits import BitArray
from deltawire.codec.compact import compact_sections, read_compact
from deltawire.codec.container import Container, aligned, write_container
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch

from .models import LiveBits, densities, difference, mutate, random_bits, seeds, specs


@pytest.fixture(params=["numba", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernels.load(compiled=request.param == "numba")
    monkeypatch.setattr(kernels, "load", lambda: chosen)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a hundred elements are cut, and joined again up to twenty changes."""
    monkeypatch.setattr(segments, "UNIT_ELEMENTS", 64)
    monkeypatch.setattr(segments, "ENOUGH_CHANGES", 20)


@pytest.mark.usefixtures("loops", "small_segments")
@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("with_old", [True, False])
@given(specs=specs, seed=seeds, density=densities, threads=st.sampled_from([1, 3]))
@settings(max_examples=20, deadline=None)
def test_what_was_encoded_is_decoded(
    classes: bool, with_old: bool, specs: list, seed: int, density: float, threads: int
) -> None:
    layout, rng = Layout(specs), np.random.default_rng(seed)
    before = random_bits(layout, rng)
    patches = difference(before, mutate(before, layout, density, rng), layout)
    base = LiveBits(before)
    given_patches = patches if with_old else [without_old(patch) for patch in patches]

    sections = compact_sections(
        given_patches, layout, base=base if classes else None, threads=threads
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        write_container(path, aligned(sections), {})
        found = read_compact(Container(path), layout, old=base, classes=classes, threads=threads)

    assert [patch.name for patch in found] == [patch.name for patch in patches]
    for mine, truth in zip(found, patches, strict=True):
        assert np.array_equal(mine.indices, truth.indices)
        assert mine.indices.dtype == truth.indices.dtype
        assert np.array_equal(mine.values, truth.values)
        assert mine.old is not None
        assert np.array_equal(mine.old, truth.old)


def test_a_relative_file_is_refused_without_its_base(tmp_path: Path) -> None:
    layout, rng = Layout(wide_spec()), np.random.default_rng(0)
    before = random_bits(layout, rng)
    patches = difference(before, nudge(before), layout)
    write_container(tmp_path / "d", aligned(compact_sections(patches, layout)), {})

    with pytest.raises(LayoutMismatch, match="no base was given"):
        read_compact(Container(tmp_path / "d"), layout, old=None, classes=False)


def test_a_file_without_old_values_needs_no_base(tmp_path: Path) -> None:
    layout, rng = Layout(wide_spec()), np.random.default_rng(0)
    before = random_bits(layout, rng)
    patches = [without_old(p) for p in difference(before, nudge(before), layout)]
    write_container(tmp_path / "d", aligned(compact_sections(patches, layout)), {})

    found = read_compact(Container(tmp_path / "d"), layout, old=None, classes=False)

    assert np.array_equal(found[0].values, patches[0].values)


def without_old(patch: SparsePatch) -> SparsePatch:
    return SparsePatch(name=patch.name, indices=patch.indices, values=patch.values)


def wide_spec() -> list[TensorSpec]:
    return [TensorSpec(name="w", shape=[50, 100], dtype="BF16")]


def nudge(before: Mapping[str, BitArray]) -> dict[str, BitArray]:
    """Every seventh element one unit up."""
    after = {name: bits.copy() for name, bits in before.items()}
    for bits in after.values():
        bits[::7] += 1
    return after
