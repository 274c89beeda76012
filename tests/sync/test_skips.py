"""Merged deltas: the same weights in fewer bytes, and laggards take them."""

from collections.abc import Callable
from typing import Any

import pytest

from deltawire.protocol.layout import ObjectKind
from deltawire.sync.skips import RecentDeltas


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
