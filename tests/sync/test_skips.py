"""Merged deltas: the same weights in fewer bytes, and laggards take them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import LayoutMismatch
from deltawire.protocol.layout import ObjectKind
from deltawire.sync.skips import RecentDeltas, merged

SIZE = 12
LAYOUT = Layout(TensorSpec(name=name, shape=[SIZE], dtype="BF16") for name in ("a", "b"))
Bits = dict[str, np.ndarray[Any, np.dtype[np.uint16]]]

changes = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, SIZE - 1)), st.integers(0, 3), max_size=9
)


def _zeros() -> Bits:
    return {name: np.zeros(SIZE, np.uint16) for name in LAYOUT}


def _delta(bits: Bits, change: dict[tuple[str, int], int]) -> list[SparsePatch]:
    """Write a change into the weights; returns it as patches, as a diff finds it."""
    patches = []
    for name in LAYOUT:
        wanted = bits[name].copy()
        for (tensor, position), value in change.items():
            if tensor == name:
                wanted[position] = value
        indices = np.flatnonzero(wanted != bits[name]).astype(np.int32)
        if indices.size:
            patches.append(
                SparsePatch(
                    name=name, indices=indices, values=wanted[indices], old=bits[name][indices]
                )
            )
        bits[name] = wanted
    return patches


@given(st.lists(changes, max_size=6))
def test_a_merge_leads_where_its_deltas_lead_and_carries_nothing_more(
    chain: list[dict[tuple[str, int], int]],
) -> None:
    end = _zeros()
    patches = merged([_delta(end, change) for change in chain], LAYOUT)

    start = _zeros()
    for patch in patches:
        assert patch.old is not None
        assert np.array_equal(start[patch.name][patch.indices], patch.old)
        assert (patch.values != patch.old).all()
        start[patch.name][patch.indices] = patch.values
    assert all(np.array_equal(start[name], end[name]) for name in LAYOUT)
    assert [patch.name for patch in patches] == sorted(patch.name for patch in patches)


def test_a_merge_without_old_values_is_refused() -> None:
    patch = SparsePatch(name="a", indices=np.array([1], np.int32), values=np.array([1], np.uint16))

    with pytest.raises(LayoutMismatch, match="no old values"):
        merged([[patch], [patch]], LAYOUT)


def test_levels_end_at_their_multiples_and_need_a_whole_run_of_versions() -> None:
    recent = RecentDeltas([4, 2])
    ended = {version: [len(run) for run in recent.add(version, [])] for version in range(1, 9)}

    assert ended == {1: [], 2: [2], 3: [], 4: [2, 4], 5: [], 6: [2], 7: [], 8: [2, 4]}
    assert recent.add(12, []) == []
    with pytest.raises(ValueError, match="at least 2"):
        RecentDeltas([1])


def test_a_laggard_takes_the_skip_file(
    trainer: Any,
    open_publisher: Callable[..., Any],
    replica: Any,
    expected_bits: Callable[[Any], Any],
) -> None:
    publisher = open_publisher(trainer, skip_levels=(4,), anchor_every=100)
    replica.catch_up()
    for _ in range(5):
        trainer.step()
        publisher.publish(trainer.named())
    publisher.wait_for_anchor()

    replica.follower.head()
    route = replica.follower.route(0, 5)
    assert [(link.kind, link.base_version, link.version) for link in route] == [
        (ObjectKind.SKIP, 0, 4),
        (ObjectKind.DELTA, 4, 5),
    ]
    assert replica.catch_up() == 5
    assert replica.bits() == expected_bits(trainer)
