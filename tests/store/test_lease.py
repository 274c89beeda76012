"""The lease under a scheduler that decides who runs next: time passes only in `sleep`."""

from collections.abc import Generator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.protocol.errors import Fenced
from deltawire.store.lease import Lease

SETTLE_S, ABANDONED_S = 1.0, 10.0


@dataclass
class _World:
    """One lease object and one clock."""

    nonce: str | None = None
    now_s: float = 0.0
    writes: int = 0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class _Object:
    def __init__(self, world: _World, *, rival_after: int | None = None) -> None:
        self._world, self._rival_after = world, rival_after

    def look(self) -> str | None:
        return self._world.nonce

    def write(self) -> str:
        self._world.writes += 1
        mine = f"nonce {self._world.writes}"
        self._world.nonce = mine
        if self._rival_after is not None and self._world.writes <= self._rival_after:
            self._world.nonce = f"rival {self._world.writes}"
        return mine


def _lease(world: _World, **options: int) -> Lease:
    return Lease(
        _Object(world, **options),
        name="latest.json",
        settle_s=SETTLE_S,
        abandoned_s=ABANDONED_S,
        sleep=world.sleep,
        clock=lambda: world.now_s,
    )


def test_a_free_lease_is_held_after_one_settling_time() -> None:
    world = _World()
    _lease(world).hold()

    assert (world.writes, world.now_s) == (1, SETTLE_S)


def test_a_held_lease_costs_one_look() -> None:
    world = _World()
    lease = _lease(world)
    lease.hold()
    lease.hold()

    assert (world.writes, world.now_s) == (1, SETTLE_S)


def test_the_lease_of_a_dead_writer_is_taken_after_it_was_silent() -> None:
    world = _World(nonce="of a dead writer")
    _lease(world).hold()

    assert world.now_s == ABANDONED_S + SETTLE_S


def test_a_holder_that_lost_its_lease_must_win_it_again() -> None:
    world = _World()
    lease = _lease(world)
    lease.hold()
    world.nonce = "taken"
    lease.hold()

    assert world.writes == 2
    assert world.now_s >= ABANDONED_S


def test_a_writer_that_keeps_losing_gives_up() -> None:
    world = _World()
    with pytest.raises(Fenced, match=r"latest\.json is being written by another writer"):
        _lease(world, rival_after=99).hold()


def test_a_writer_that_loses_once_tries_again() -> None:
    world = _World()
    _lease(world, rival_after=1).hold()

    assert world.nonce == "nonce 2"


@given(st.lists(st.integers(0, 2), max_size=40))
def test_of_writers_whose_writes_land_within_the_settling_time_one_holds(order: list[int]) -> None:
    """Three writers, each a sequence look - write - settle - look; a write lands at once and
    settling ends only after every writer that had looked has written: Fischer's premise."""
    nonce: list[str | None] = [None]
    about_to_write: set[int] = set()
    holders: list[int] = []

    def writer(name: int) -> Generator[None, None, None]:
        if nonce[0] is not None:
            return
        about_to_write.add(name)
        yield
        nonce[0] = str(name)
        about_to_write.discard(name)
        yield
        while about_to_write:
            yield
        if nonce[0] == str(name):
            holders.append(name)

    running = {name: writer(name) for name in range(3)}
    for name in [*order, *[0, 1, 2] * 6]:
        next(running[name], None)

    assert len(holders) <= 1
