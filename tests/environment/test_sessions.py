"""When a session has been left behind, by a clock that tests turn."""

import pytest

from deltawire.protocol.errors import CapacityReached
from deltawire_environment.sessions import Session, SessionGone, Sessions


class House:
    """Sessions with a clock in hand and a list of closed episodes."""

    def __init__(self, limit: int = 4) -> None:
        self.now = 0.0
        self.closed: list[Session] = []
        self.sessions = Sessions(
            limit=limit,
            idle_s=100,
            silent_s=1000,
            grace_s=10,
            close_episode=self.closed.append,
            clock=lambda: self.now,
        )
        self.evicted = 0

    def evict(self) -> None:
        self.evicted += 1

    def after(self, seconds: float) -> int:
        self.now += seconds
        self.sessions.reap()
        return len(self.sessions)


@pytest.fixture
def house() -> House:
    return House()


def attached(house: House, *, resumable: bool) -> tuple[Session, int]:
    session = house.sessions.open(owned_by_socket=True)
    session.resumable = resumable
    return session, house.sessions.attach(session, house.evict)


def test_a_session_that_waits_for_a_slow_generation_is_kept(house: House) -> None:
    attached(house, resumable=False)
    assert house.after(900) == 1
    assert house.after(200) == 0
    assert house.evicted == 1
    assert house.sessions.reaped_total == 1


def test_a_session_of_a_plain_client_ends_with_its_socket(house: House) -> None:
    session, number = attached(house, resumable=False)
    house.sessions.detach(session, number)
    assert house.closed == [session]
    with pytest.raises(SessionGone):
        house.sessions.find(session.id)


def test_a_session_whose_client_can_come_back_waits_for_it_and_no_longer(house: House) -> None:
    session, number = attached(house, resumable=True)
    house.sessions.detach(session, number)
    assert house.after(9) == 1
    assert house.sessions.find(session.id) is session
    assert house.after(11) == 0


def test_a_session_without_a_socket_is_closed_when_idle(house: House) -> None:
    session = house.sessions.open(owned_by_socket=False)
    assert house.after(60) == 1
    house.sessions.touch(session)
    assert house.after(60) == 1
    assert house.after(60) == 0


async def test_a_session_whose_world_still_thinks_is_not_idle(house: House) -> None:
    session = house.sessions.open(owned_by_socket=False)
    async with session.lock:
        assert house.after(500) == 1
    assert house.after(0) == 0


def test_cut_sessions_give_way_when_the_house_is_full_oldest_first() -> None:
    house = House(limit=2)
    first, number = attached(house, resumable=True)
    house.sessions.detach(first, number)
    house.now += 1
    second, number = attached(house, resumable=True)
    house.sessions.detach(second, number)
    third, _ = attached(house, resumable=True)
    assert house.closed == [first]
    attached(house, resumable=True)
    assert house.closed == [first, second]
    with pytest.raises(CapacityReached):
        house.sessions.open(owned_by_socket=True)
    assert house.sessions.find(third.id) is third


def test_a_late_detach_of_a_replaced_socket_changes_nothing(house: House) -> None:
    session, old = attached(house, resumable=False)
    house.sessions.attach(session, house.evict)
    assert house.evicted == 1
    house.sessions.detach(session, old)
    assert house.closed == []


def test_a_draining_house_takes_nobody_new(house: House) -> None:
    attached(house, resumable=False)
    house.sessions.draining = True
    with pytest.raises(CapacityReached, match="shutting down"):
        house.sessions.open(owned_by_socket=True)
    assert len(house.sessions) == 1


def test_closing_twice_closes_the_episode_once(house: House) -> None:
    session = house.sessions.open(owned_by_socket=False)
    house.sessions.close(session)
    house.sessions.close(session)
    assert house.closed == [session]
