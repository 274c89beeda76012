"""What may be removed: never a link that a route still needs."""

from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.protocol.chain import Head, Link, plan_route
from deltawire.protocol.layout import ObjectKind, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import ObjectInfo
from deltawire.sync.cadence import Cadence, anchor_due
from deltawire.sync.retention import linked_keys, may_be_arriving, outlived, plan_links, plan_sweep


def _link(kind: ObjectKind, version: int, base: int | None = None, *, size: int = 10) -> Link:
    return Link(
        version=PolicyVersion(version),
        kind=kind,
        key=object_key(kind, version, base=base if kind is ObjectKind.SKIP else None),
        base_version=None if base is None else PolicyVersion(base),
        bytes=size,
        sha256="0" * 64,
        new_digest="",
    )


def _head(version: int, anchors: Set[int], skips: Set[tuple[int, int]] = frozenset()) -> Head:
    links = [_link(ObjectKind.DELTA, v, v - 1) for v in range(1, version + 1)]
    links += [_link(ObjectKind.ANCHOR, v) for v in sorted(anchors | {0}) if v <= version]
    links += [
        _link(ObjectKind.SKIP, high, low) for low, high in sorted(skips) if low < high <= version
    ]
    return Head(run_id="r", version=PolicyVersion(version), links=links)


heads = st.builds(
    _head,
    st.integers(0, 30),
    st.sets(st.integers(0, 30), max_size=6),
    st.sets(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6),
)


@given(heads, st.integers(1, 40))
def test_every_replica_that_is_served_keeps_a_route(head: Head, keep_versions: int) -> None:
    plan = plan_links(head, keep_versions=keep_versions)

    oldest = max(0, head.version - keep_versions)
    for have in [None, *range(oldest, head.version + 1)]:
        route = plan_route(plan.keep, have=have, want=head.version)
        assert not {link.key for link in route} & {link.key for link in plan.drop}
    assert len(plan.keep) + len(plan.drop) == len(head.links)


@given(heads, st.integers(1, 40))
def test_what_is_kept_is_bounded_by_the_anchors(head: Head, keep_versions: int) -> None:
    plan = plan_links(head, keep_versions=keep_versions)

    assert plan_links(head.model_copy(update={"links": plan.keep}), keep_versions=keep_versions)
    for link in plan.drop:
        assert link.version <= head.version - keep_versions or (
            link.base_version is not None and link.base_version < head.version - keep_versions
        )


def test_the_anchor_at_the_floor_stays_and_the_deltas_under_it_go() -> None:
    plan = plan_links(_head(10, {4, 8}), keep_versions=4)

    assert sorted(link.key for link in plan.drop) == [
        "anchors/step_000000.safetensors",
        *(f"deltas/step_{v:06d}.safetensors" for v in range(1, 5)),
    ]


def test_without_an_old_anchor_everything_stays() -> None:
    assert plan_links(_head(10, set()), keep_versions=20).drop == []


@pytest.mark.parametrize(
    ("delta_bytes", "anchor_takes", "bound"),
    [(10, 1, 513 + 128), (10, 40, 513 + 40 + 128), (10**4, 3, 128 + 60), (None, 0, 128)],
    ids=["tiny deltas", "slow anchors", "large deltas", "every version an anchor"],
)
def test_latest_json_stays_small_however_long_the_run(
    delta_bytes: int | None, anchor_takes: int, bound: int
) -> None:
    head, cadence = Head(run_id="r", links=[_link(ObjectKind.ANCHOR, 0, size=10**6)]), Cadence()
    arriving: list[tuple[int, Link]] = []
    most = 0
    for version in range(1, 3000):
        if delta_bytes is None:
            link = _link(ObjectKind.ANCHOR, version, size=10**6)
        else:
            link = _link(ObjectKind.DELTA, version, version - 1, size=delta_bytes)
        arrived = [anchor for at, anchor in arriving if at <= version]
        arriving = [pair for pair in arriving if pair[0] > version]
        gone = {old.key for old in outlived(head, link, keep_versions=64)}
        left = [old for old in head.links if old.key not in gone]
        head = head.model_copy(update={"version": version, "links": [*left, link, *arrived]})
        most = max(most, len(head.links))
        if not arriving and anchor_due(head.links, version=version, cadence=cadence):
            anchor = _link(ObjectKind.ANCHOR, version, size=10**6)
            arriving.append((version + anchor_takes, anchor))

    assert 64 < most <= bound + 8  # anchors between them


def _lying(key: str, modified_at: float) -> ObjectInfo:
    return ObjectInfo(key=key, bytes=1, modified_at=modified_at)


def test_a_sweep_takes_old_unlinked_objects_only() -> None:
    head = _head(2, set())
    listing = [_lying(f"r/{key}", 0.0) for key in linked_keys(head)] + [
        _lying("r/deltas/step_000003.safetensors", 0.0),
        _lying("r/deltas/step_000001.2.safetensors", 0.0),
        _lying("r/anchors/step_000002.safetensors", 0.0),
        _lying("r/anchors/step_000002-00001-of-00009.safetensors", 0.0),
        _lying("r/deltas/step_000004.safetensors", 95.0),
        _lying("r/latest.json", 0.0),
        _lying("r/run.json", 0.0),
        _lying("r/model/config.json", 0.0),
        _lying("r/notes.txt", 0.0),
        _lying("r/deltas/step_1.safetensors", 0.0),
    ]
    swept = plan_sweep(
        listing, head, now_s=100.0, grace_s=10.0, arriving=["anchors/step_000002.safetensors"]
    )

    assert [info.key for info in swept] == [
        "r/deltas/step_000003.safetensors",
        "r/deltas/step_000001.2.safetensors",
    ]


def test_a_sweep_from_outside_spares_an_anchor_that_may_be_on_its_way() -> None:
    head = _head(5, {2})
    shard = "r/anchors/step_000004-00001-of-00009.safetensors"
    orphan = "r/anchors/step_000001.safetensors"
    listing = [_lying(key, 0.0) for key in (shard, orphan)]

    swept = plan_sweep(listing, head, now_s=10**6, arriving=may_be_arriving(head))

    assert [info.key for info in swept] == [orphan]
