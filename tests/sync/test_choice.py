"""The encoding of a version when it is left to the publisher: by what was measured, and why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deltawire.store.base import ObjectInfo
from deltawire.store.local import LocalStore
from deltawire.sync.choice import EncodingChoice, Rate
from deltawire.sync.publisher import Publisher

SIDE = 300


class Clock:
    """Stands still but for what a store adds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowStore:
    """A bucket behind a link of so many bytes a second, by a clock of its own."""

    def __init__(self, inner: LocalStore, clock: Clock, bytes_per_s: float) -> None:
        self._inner, self._clock, self.bytes_per_s = inner, clock, bytes_per_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, source: Path) -> ObjectInfo:
        self._clock.now_s += source.stat().st_size / self.bytes_per_s
        return self._inner.put(key, source)


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., list[Any]]:
    """Publish a few versions over a link; their records."""

    def publishing(speeds_per_s: list[float], **options: Any) -> list[Any]:
        clock = Clock()
        store = SlowStore(LocalStore(tmp_path / "bucket"), clock, 1.0)
        random = torch.Generator().manual_seed(0)
        weight = torch.randn(SIDE, SIDE, generator=random)
        records = []
        with Publisher.open(
            store,
            run_id="run",
            named_tensors=[("weight", weight)],
            anchor_every=1000,
            clock=clock,
            **options,
        ) as publisher:
            for bytes_per_s in speeds_per_s:
                store.bytes_per_s = bytes_per_s
                weight += 0.003 * weight * (torch.rand(SIDE, SIDE, generator=random) < 0.1)
                records.append(publisher.publish([("weight", weight)]).record)
        return records

    return publishing


def test_a_slow_link_gets_classes_and_a_fast_one_compact(
    publish: Callable[..., list[Any]],
) -> None:
    records = publish([1e6] * 3 + [1e9] * 25)

    assert [record.encoding for record in records[:4]] == ["compact"] + ["classes"] * 3
    assert records[-1].encoding == "compact"
    assert records[0].encoding_reason == "no upload measured yet"
    assert "1 MB/s" in records[1].encoding_reason
    assert "walking the base" in records[-1].encoding_reason


def test_a_configured_encoding_is_used_whatever_the_link(
    publish: Callable[..., list[Any]],
) -> None:
    records = publish([1e3] * 3, encoding="compact")

    assert {(r.encoding, r.encoding_reason) for r in records} == {("compact", "configured")}


def test_where_nobody_holds_the_whole_base_classes_gives_way() -> None:
    for wanted in ("auto", "classes"):
        choice = EncodingChoice(wanted)
        choice.uploaded(10, 10.0)
        chosen = choice.choose(changed=10**6, total=10**8, holds_base=False)
        assert chosen.encoding == "compact" and "whole base" in chosen.reason


def test_a_machine_that_walks_slowly_keeps_to_compact_and_tries_again_later() -> None:
    def chosen() -> str:
        return choice.choose(changed=10**6, total=10**8, holds_base=True).encoding

    choice = EncodingChoice("auto")
    choice.uploaded(10**6, 2.0)
    assert chosen() == "classes"
    for _ in range(20):
        choice.encoded("classes", changed=10**6, total=10**8, seconds=100.0)
    assert chosen() == "compact"
    for _ in range(40):
        choice.encoded("compact", changed=10**6, total=10**8, seconds=0.07)
    assert chosen() == "classes"


def test_a_rate_forgets_old_speeds_and_weighs_by_size() -> None:
    rate = Rate()
    assert rate.per_s is None
    rate.add(1000, 1.0)
    rate.add(0, 1.0)
    assert rate.per_s == pytest.approx(700 / 1.7)
    for _ in range(60):
        rate.add(50, 1.0)
    assert rate.per_s == pytest.approx(50, rel=0.01)
