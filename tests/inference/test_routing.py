"""The way past objects that were refused."""

import pytest

from deltawire.protocol.chain import Head, Link, Shard
from deltawire.protocol.errors import VersionGap
from deltawire.protocol.layout import ObjectKind, object_key
from deltawire.protocol.versions import PolicyVersion
from deltawire_inference.routing import Routing


def link(version: int, *, base: int | None = None, size: int = 10, sha: str = "a") -> Link:
    """A delta from the version before, or an anchor."""
    kind = ObjectKind.ANCHOR if base is None else ObjectKind.DELTA
    return Link(
        version=PolicyVersion(version),
        kind=kind,
        key=object_key(kind, version),
        base_version=None if base is None else PolicyVersion(base),
        bytes=size,
        sha256=sha * 64,
        new_digest="0" * 32,
    )


def head(*links: Link) -> Head:
    """A committed state with these links."""
    return Head(run_id="r", version=max(x.version for x in links), links=list(links))


CHAIN = head(link(0, size=10**9), link(1, base=0), link(2, base=1), link(3, base=2))
ZERO, ONE = PolicyVersion(0), PolicyVersion(1)


def versions(route: list[Link]) -> list[int]:
    """Where each step of a route leads."""
    return [step.version for step in route]


def test_a_refused_route_is_walked_object_by_object_until_one_stands_alone() -> None:
    routing = Routing()
    route = routing.plan(CHAIN, have=ZERO)
    assert versions(route) == [1, 2, 3]

    assert routing.suspect(route) is None
    alone = routing.plan(CHAIN, have=ZERO)
    assert versions(alone) == [1]
    routing.arrived()  # the first was good

    route = routing.plan(CHAIN, have=ONE)
    assert routing.suspect(route) is None
    alone = routing.plan(CHAIN, have=ONE)
    blamed = routing.suspect(alone)
    assert blamed is not None and blamed.version == 2


def test_what_was_refused_is_passed_by_an_anchor_and_tried_again_with_other_bytes() -> None:
    routing = Routing()
    routing.refuse(CHAIN.links[2])

    with pytest.raises(VersionGap):
        routing.plan(CHAIN, have=ONE)
    assert versions(routing.plan(CHAIN, have=ZERO)) == [1]
    assert versions(routing.plan(head(*CHAIN.links, link(3)), have=ONE)) == [3]
    replaced = head(*CHAIN.links[:2], link(2, base=1, sha="b"), CHAIN.links[3])
    assert versions(routing.plan(replaced, have=ONE)) == [2, 3]
    assert routing.rejected_total == 1


def test_a_file_that_arrives_damaged_is_given_three_chances() -> None:
    routing = Routing()
    route = routing.plan(CHAIN, have=ZERO)
    for _ in range(2):
        routing.damaged(route, "r/" + route[1].key)
    assert versions(routing.plan(CHAIN, have=ZERO)) == [1, 2, 3]

    routing.damaged(route, "r/" + route[1].key)

    assert versions(routing.plan(CHAIN, have=ZERO)) == [1]
    assert routing.rejected_total == 1


def test_a_damaged_shard_counts_against_its_anchor() -> None:
    shards = [
        Shard(key=object_key(ObjectKind.ANCHOR, 3, shard=(number, 2)), bytes=5, sha256="a" * 64)
        for number in (1, 2)
    ]
    sharded = link(3).model_copy(update={"key": shards[0].key, "shards": shards})
    routing, chain = Routing(), head(*CHAIN.links, sharded)
    assert routing.plan(chain, have=None) == [sharded]

    for _ in range(3):
        routing.damaged([sharded], "r/" + shards[1].key)

    assert versions(routing.plan(chain, have=None)) == [0, 1, 2, 3]
    assert routing.rejected_total == 1
