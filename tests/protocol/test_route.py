"""Route planning: by table, and against every route there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.protocol.chain import Link, plan_route
from deltawire.protocol.errors import VersionGap
from deltawire.protocol.layout import ObjectKind, object_key
from deltawire.protocol.versions import PolicyVersion

KB, MB = 1024, 1024 * 1024
PER_OBJECT = 64 * KB
"""What one more object costs beside its bytes."""


def _anchor(version: int, size: int = 200 * MB) -> Link:
    return _link(ObjectKind.ANCHOR, version, None, size)


def _delta(version: int, size: int = MB) -> Link:
    return _link(ObjectKind.DELTA, version, version - 1, size)


def _skip(base: int, version: int, size: int) -> Link:
    return _link(ObjectKind.SKIP, version, base, size)


def _adapter(version: int, size: int = MB) -> Link:
    return _link(ObjectKind.ADAPTER, version, None, size)


def _link(kind: ObjectKind, version: int, base: int | None, size: int) -> Link:
    return Link(
        version=PolicyVersion(version),
        kind=kind,
        key=object_key(kind, version, base=base if kind is ObjectKind.SKIP else None),
        base_version=None if base is None else PolicyVersion(base),
        bytes=size,
        sha256="",
        new_digest="",
    )


def _keys(links: list[Link], have: int | None, want: int) -> list[str]:
    return [
        f"{link.kind} {link.version}"
        if link.base_version is None or link.kind is ObjectKind.DELTA
        else f"skip {link.base_version}-{link.version}"
        for link in plan_route(links, have=have, want=want)
    ]


CHAIN = [_anchor(0), *(_delta(v) for v in range(1, 13)), _anchor(10)]


@pytest.mark.parametrize(
    ("have", "want", "route"),
    [
        (12, 12, []),
        (11, 12, ["delta 12"]),
        (8, 11, ["delta 9", "delta 10", "delta 11"]),
        (None, 0, ["anchor 0"]),
        (None, 10, ["anchor 10"]),
        (None, 12, ["anchor 10", "delta 11", "delta 12"]),
        (None, 9, ["anchor 0", *(f"delta {v}" for v in range(1, 10))]),
        (12, 10, ["anchor 10"]),
    ],
)
def test_the_cheapest_route(have: int | None, want: int, route: list[str]) -> None:
    assert _keys(CHAIN, have, want) == route


def test_a_missing_delta_leads_over_the_anchor() -> None:
    links = [link for link in CHAIN if link.key != object_key(ObjectKind.DELTA, 9)]
    assert _keys(links, 7, 11) == ["anchor 10", "delta 11"]


def test_heavy_deltas_lose_against_an_anchor() -> None:
    links = [_anchor(0), *(_delta(v, 60 * MB) for v in range(1, 6)), _anchor(5)]
    assert _keys(links, 0, 5) == ["anchor 5"]
    assert _keys(links, 3, 5) == ["delta 4", "delta 5"]


def test_a_skip_file_serves_a_laggard() -> None:
    links = [*CHAIN, _skip(0, 8, 4 * MB)]
    assert _keys(links, 0, 9) == ["skip 0-8", "delta 9"]
    assert _keys(links, 1, 9)[0] == "delta 2"


def test_an_adapter_goes_onto_any_version_but_not_onto_nothing() -> None:
    links = [_anchor(0), _adapter(3), _delta(4, KB), _adapter(7)]
    assert _keys(links, None, 7) == ["anchor 0", "adapter 7"]
    assert _keys(links, 3, 7) == ["adapter 7"]
    assert _keys(links, 3, 4) == ["delta 4"]
    assert _keys(links, 1, 4) == ["adapter 3", "delta 4"]
    with pytest.raises(VersionGap):
        plan_route(links[1:], have=None, want=7)


def test_a_round_trip_is_worth_some_bytes() -> None:
    links = [_delta(1, KB), _delta(2, KB), _skip(0, 2, 60 * KB)]
    assert _keys(links, 0, 2) == ["skip 0-2"]


def test_a_foreign_version_starts_from_an_anchor() -> None:
    assert _keys(CHAIN, 99, 12) == ["anchor 10", "delta 11", "delta 12"]


@pytest.mark.parametrize(
    ("links", "have", "want"),
    [([], None, 0), (CHAIN, None, 13), ([_delta(1), _delta(3)], 0, 3), ([_delta(1)], None, 1)],
)
def test_no_route_is_a_gap_that_names_both_ends(
    links: list[Link], have: int | None, want: int
) -> None:
    with pytest.raises(VersionGap, match=f"to version {want}") as raised:
        plan_route(links, have=have, want=want)
    assert (raised.value.have, raised.value.want) == (have, want)


link_lists = st.lists(
    st.builds(_anchor, st.integers(0, 6), st.integers(0, 9).map(lambda n: n * MB))
    | st.builds(_delta, st.integers(1, 6), st.integers(0, 9).map(lambda n: n * MB))
    | st.builds(_adapter, st.integers(1, 6), st.integers(0, 9).map(lambda n: n * MB))
    | st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 9))
    .filter(lambda t: t[0] < t[1])
    .map(lambda t: _skip(t[0], t[1], t[2] * MB)),
    max_size=9,
)


def _cost(route: list[Link]) -> int:
    return sum(link.bytes + PER_OBJECT for link in route)


def _every_route(links: list[Link], have: int | None, want: int) -> list[list[Link]]:
    """All routes without a repeated version, by plain search."""
    found: list[list[Link]] = []

    def walk(at: int | None, route: list[Link], seen: set[int]) -> None:
        if at == want and (route or have == want):
            found.append(route)
            return
        for link in links:
            fits = link.base_version == at
            if link.base_version is None:
                fits = link.kind is ObjectKind.ANCHOR or at is not None
            if fits and link.version <= want and link.version not in seen:
                walk(link.version, [*route, link], seen | {link.version})

    walk(have, [], set() if have is None else {have})
    return found


@given(link_lists, st.none() | st.integers(0, 6), st.integers(0, 6))
def test_no_other_route_is_cheaper(links: list[Link], have: int | None, want: int) -> None:
    others = _every_route(links, have, want)
    try:
        route = plan_route(links, have=have, want=want)
    except VersionGap:
        assert others == []
        return

    assert _cost(route) == min(map(_cost, others))
    at = have
    for link in route:
        assert link.base_version in (None, at)
        assert at is not None or link.kind is ObjectKind.ANCHOR
        at = link.version
    assert at == want
