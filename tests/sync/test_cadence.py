"""When an anchor is due, by table and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.protocol.chain import Link
from deltawire.protocol.layout import ObjectKind, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire.sync.cadence import Cadence, anchor_due


def _link(kind: ObjectKind, version: int, size: int) -> Link:
    return Link(
        version=PolicyVersion(version),
        kind=kind,
        key=object_key(kind, version),
        base_version=None if kind is ObjectKind.ANCHOR else PolicyVersion(version - 1),
        bytes=size,
        sha256="0" * 64,
        new_digest="",
    )


def _chain(delta_bytes: list[int], anchors: dict[int, int]) -> list[Link]:
    return [_link(ObjectKind.ANCHOR, v, size) for v, size in anchors.items()] + [
        _link(ObjectKind.DELTA, v, size) for v, size in enumerate(delta_bytes, start=1)
    ]


def test_a_chain_without_an_anchor_needs_one() -> None:
    assert anchor_due([], version=0, cadence=Cadence())
    assert anchor_due(_chain([1], {}), version=1, cadence=Cadence())


@pytest.mark.parametrize(("deltas", "due"), [([20, 30], False), ([20, 31], True)])
def test_adaptive_weighs_deltas_against_half_an_anchor(deltas: list[int], due: bool) -> None:
    assert anchor_due(_chain(deltas, {0: 100}), version=2, cadence=Cadence()) is due


def test_only_deltas_after_the_newest_anchor_count() -> None:
    chain = _chain([90, 90, 90, 10], {0: 100, 3: 100})
    assert not anchor_due(chain, version=4, cadence=Cadence())


def test_a_long_replay_is_cut_however_light() -> None:
    chain = _chain([0] * 11, {0: 100})
    assert anchor_due(chain, version=11, cadence=Cadence(max_deltas=10))
    assert not anchor_due(chain[:-1], version=10, cadence=Cadence(max_deltas=10))


def test_fixed_cadence_ignores_weight() -> None:
    heavy = _chain([1000] * 9, {0: 100})
    assert not anchor_due(heavy, version=9, cadence=Cadence(every=10))
    assert anchor_due(_chain([0] * 10, {0: 100}), version=10, cadence=Cadence(every=10))


def test_a_fixed_anchor_that_failed_is_due_again() -> None:
    chain = _chain([0] * 11, {0: 100})
    assert anchor_due(chain, version=11, cadence=Cadence(every=10))


def test_an_anchor_of_this_very_version_is_enough() -> None:
    assert not anchor_due(_chain([99], {0: 100, 1: 100}), version=1, cadence=Cadence(every=1))


def test_a_cadence_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Cadence(every=0)


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 7) | st.none())
def test_followed_from_the_start_no_joiner_ever_replays_more_than_the_bound(
    sizes: list[int], every: int | None
) -> None:
    cadence = Cadence(every=every, max_deltas=20)
    anchors, deltas = {0: 100}, []
    for version, size in enumerate(sizes, start=1):
        deltas.append(size)
        if anchor_due(_chain(deltas, anchors), version=version, cadence=cadence):
            anchors[version] = 100
        since = deltas[max(anchors) :]
        if every is None:
            assert sum(since) <= 50
            assert len(since) <= 20
        else:
            assert len(since) < every
