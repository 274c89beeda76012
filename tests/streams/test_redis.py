"""What Redis does to us: restarts, failovers, lost replies, full memory, wrong passwords."""

import asyncio
import contextlib
import datetime
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from deltawire.protocol import topics
from deltawire.protocol.errors import SettingsError, StreamError, StreamUnavailable
from deltawire.streams import local_server
from deltawire.streams.memory import MemoryStreams
from deltawire.streams.open import open_streams, open_trainer_streams
from deltawire.streams.redis import RedisStreams
from deltawire.streams.redis_client import redis_client


@contextlib.asynccontextmanager
async def streams_at(
    url: str, *, run_id: str = "", **options: float
) -> AsyncIterator[RedisStreams]:
    streams = RedisStreams(redis_client(url), run_id=run_id or uuid.uuid4().hex, **options)
    try:
        yield streams
    finally:
        await streams.close()


@pytest.fixture
def own_server(redis_server, tmp_path):
    """A server that a test may kill; the caller gets the current one by calling."""
    servers = [local_server.start(tmp_path / "redis", binary=redis_server.binary)]

    class Own:
        @property
        def url(self) -> str:
            return servers[-1].url

        def kill(self) -> None:
            servers[-1].kill()

        def start(self) -> None:
            old = servers[-1]
            servers.append(
                local_server.start(
                    old.folder,
                    port=old.port,
                    password=old.password.get_secret_value(),
                    binary=old.binary,
                )
            )

    yield Own()
    servers[-1].stop()


# -- restarts -------------------------------------------------------------------------------------


async def test_nothing_answered_for_is_lost_when_redis_is_killed(
    own_server, make_ticket, make_group
):
    async with streams_at(own_server.url) as streams:
        await streams.issue([make_ticket("t-0"), make_ticket("t-1"), make_ticket("t-2")])
        finished = await streams.claim("p", timeout_s=5.0)
        await streams.finish(finished, make_group("t-0"))
        [delivered] = await streams.read(limit=1, timeout_s=5.0)
        leased = await streams.claim("p", timeout_s=5.0)

        own_server.kill()
        own_server.start()

        await streams.heartbeat(leased)
        depth = await streams.depth()
        assert (depth.tickets_open, depth.groups_pending) == (2, 1)
        assert await streams.finish(leased, make_group("t-1")) is True
        await streams.ack([delivered.entry_id])
        [second] = await streams.read(limit=5, timeout_s=5.0)
        assert second.group.group_id == "t-1"


async def test_calls_wait_while_redis_is_away(own_server, make_ticket):
    async with streams_at(own_server.url) as streams:
        await streams.issue([make_ticket("t-0")])
        own_server.kill()
        waiting = [
            asyncio.create_task(streams.issue([make_ticket("t-1")])),
            asyncio.create_task(streams.depth()),
        ]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        own_server.start()
        await asyncio.gather(*waiting)
        assert (await streams.depth()).tickets_open == 2


async def test_a_redis_that_stays_away_is_unavailable(own_server):
    async with streams_at(own_server.url, patience_s=0.3) as streams:
        own_server.kill()
        with pytest.raises(StreamUnavailable, match="did not answer"):
            await streams.depth()


async def test_a_redis_that_forgot_everything_is_used_again(redis_server, make_ticket):
    run_id = uuid.uuid4().hex
    async with streams_at(redis_server.url, run_id=run_id) as streams:
        await streams.issue([make_ticket("t-0")])
        admin = Redis.from_url(redis_server.url)
        await admin.delete(topics.tickets_stream(run_id), topics.groups_stream(run_id))
        await admin.aclose()
        assert await streams.claim("p", timeout_s=0.0) is None
        await streams.issue([make_ticket("t-1")])
        assert (await streams.claim("p", timeout_s=5.0)).ticket.ticket_id == "t-1"


async def test_what_was_acked_leaves_no_ids_behind(redis_server, make_ticket, make_group):
    run_id = uuid.uuid4().hex
    async with streams_at(redis_server.url, run_id=run_id, remembers_s=-1.0) as streams:
        for n in range(5):
            await streams.issue([make_ticket(f"t-{n}")])
            lease = await streams.claim("p", timeout_s=5.0)
            await streams.finish(lease, make_group(f"t-{n}"))
        delivered = await streams.read(limit=5, timeout_s=5.0)
        await streams.ack([d.entry_id for d in delivered])
        admin = Redis.from_url(redis_server.url)
        names = [key.decode() async for key in admin.scan_iter(f"deltawire:{{{run_id}}}:*")]
        await admin.aclose()
        # Streams stay, empty, for their consumer groups.
        assert sorted(names) == [topics.groups_stream(run_id), topics.tickets_stream(run_id)]


class BlackHole:
    """TCP in front of Redis whose connections can go silent without being closed."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._port = port
        self._silent: set[int] = set()
        self._writers: list[asyncio.StreamWriter] = []

    def swallow(self) -> None:
        """Every connection there is: nothing comes through any more. New ones work."""
        self._silent.update(range(self.connections))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
            for writer in self._writers:
                writer.close()

    async def _accept(self, reader, writer) -> None:
        number = self.connections
        self.connections += 1
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, behind_writer]

        async def pump(source, target) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    if number not in self._silent:
                        target.write(data)
                        await target.drain()
            target.close()

        await asyncio.gather(pump(reader, behind_writer), pump(behind_reader, writer))


async def test_a_connection_that_goes_silent_is_given_up_for_another(
    redis_server, make_ticket, make_group
):
    hole = BlackHole(redis_server.port)
    async with hole.serving() as port:
        url = redis_server.url.replace(f":{redis_server.port}/", f":{port}/")
        async with streams_at(f"{url}?socket_timeout=2") as streams:
            await streams.issue([make_ticket()])
            lease = await streams.claim("p", timeout_s=5.0)
            hole.swallow()
            assert await streams.finish(lease, make_group()) is True
            hole.swallow()
            [delivered] = await streams.read(limit=1, timeout_s=10.0)
            assert delivered.group.group_id == "t-1"
            assert (await streams.depth()).doubled == 0
    assert hole.connections >= 3


# -- a trainer that comes back --------------------------------------------------------------------


async def test_a_new_trainer_first_reads_what_was_not_acked(redis_server, make_ticket, make_group):
    run_id = uuid.uuid4().hex
    async with streams_at(redis_server.url, run_id=run_id) as old:
        for n in range(4):
            await _finish(old, make_ticket(f"t-{n}"), make_group(f"t-{n}"))
        first = await old.read(limit=3, timeout_s=5.0)
        await old.ack([first[0].entry_id])

    async with streams_at(redis_server.url, run_id=run_id) as new:
        seen = []
        while groups := await new.read(limit=1, timeout_s=0.1):
            seen += groups
        assert [d.group.group_id for d in seen] == ["t-1", "t-2", "t-3"]
        assert [d.redelivered for d in seen] == [True, True, False]


async def test_a_read_whose_reply_was_lost_is_read_again_once(
    redis_server, make_ticket, make_group
):
    run_id = uuid.uuid4().hex
    async with streams_at(redis_server.url, run_id=run_id) as streams:
        for n in range(3):
            await _finish(streams, make_ticket(f"t-{n}"), make_group(f"t-{n}"))
        [kept] = await streams.read(limit=1, timeout_s=5.0)
        # Another process of the same name swallows one, as a lost reply does.
        async with streams_at(redis_server.url, run_id=run_id) as shadow:
            shadow._recovery_cursor = None
            [swallowed] = await shadow.read(limit=1, timeout_s=5.0)
        streams._recover_from(redis_errors.ConnectionError("reply lost"))
        seen = [d.group.group_id for d in await streams.read(limit=9, timeout_s=1.0)]
        seen += [d.group.group_id for d in await streams.read(limit=9, timeout_s=1.0)]
    assert (kept.group.group_id, swallowed.group.group_id) == ("t-0", "t-1")
    assert seen == ["t-1", "t-2"], "not the one that is being worked on"


async def test_a_cancelled_read_loses_nothing(redis_server, make_ticket, make_group):
    async with streams_at(redis_server.url) as streams:
        reading = asyncio.create_task(streams.read(limit=1, timeout_s=30.0))
        await asyncio.sleep(0.05)
        await _finish(streams, make_ticket(), make_group())
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            [early] = await reading
            await streams.dead_letter(early, reason="it had come before the cancellation")
            return
        [delivered] = await streams.read(limit=1, timeout_s=5.0)
        assert delivered.group.group_id == "t-1"


# -- entries that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schema": b"1", "id": b"x", "body": b"\x00garbage"}, "not"),
        ({"schema": b"77", "id": b"x", "body": b""}, "record of schema 77"),
        ({"hello": b"world"}, "record of schema"),
    ],
)
async def test_an_entry_that_cannot_be_read_is_set_aside_with_its_reason(
    fields, reason, redis_server, make_ticket, make_group
):
    run_id = uuid.uuid4().hex
    admin = Redis.from_url(redis_server.url)
    async with streams_at(redis_server.url, run_id=run_id) as streams:
        await streams.depth()
        await admin.xadd(topics.groups_stream(run_id), fields)
        await admin.xadd(topics.tickets_stream(run_id), fields)
        await _finish(streams, make_ticket(), make_group())

        [delivered] = await streams.read(limit=9, timeout_s=5.0)

        assert delivered.group.group_id == "t-1"
        assert (await streams.depth()).dead == 2
        dead = await admin.xrange(topics.dead_letters_stream(run_id))
        assert len(dead) == 2
        assert all(reason in entry[b"reason"].decode() for _, entry in dead)
        assert dead[0][1].items() >= {k.encode(): v for k, v in fields.items()}.items()
    await admin.aclose()


async def test_a_redis_without_memory_holds_producers_up_and_loses_nothing(
    tmp_path, redis_server, make_ticket, make_group
):
    server = local_server.start(tmp_path / "small", binary=redis_server.binary)
    admin = Redis.from_url(server.url)
    try:
        async with streams_at(server.url, patience_s=20.0) as streams:
            await streams.issue([make_ticket()])
            lease = await streams.claim("p", timeout_s=5.0)
            await admin.config_set("maxmemory", 1)
            finishing = asyncio.create_task(streams.finish(lease, make_group()))
            await asyncio.sleep(0.3)
            assert not finishing.done()
            assert (await streams.depth()).tickets_open == 1, "half a transaction is none"
            await admin.config_set("maxmemory", 0)
            assert await finishing is True
            depth = await streams.depth()
            assert (depth.tickets_open, depth.groups_unread, depth.doubled) == (0, 1, 0)
    finally:
        await admin.aclose()
        server.stop()


async def test_a_wrong_password_is_no_reason_to_wait(redis_server):
    wrong = redis_server.url.replace(redis_server.password.get_secret_value(), "guess")
    async with streams_at(wrong, patience_s=60.0) as streams:
        with pytest.raises(StreamError, match="credentials") as raised:
            await streams.depth()
        assert "guess" not in str(raised.value)


# -- other ways to reach Redis --------------------------------------------------------------------


async def test_a_failover_found_by_sentinel_is_followed(
    tmp_path, redis_server, make_ticket, make_group
):
    binary = redis_server.binary
    master = local_server.start(tmp_path / "a", password="pw", binary=binary)
    replica = local_server.start(
        tmp_path / "b",
        password="pw",
        binary=binary,
        extra=f"replicaof 127.0.0.1 {master.port}\nmasterauth pw\n",
    )
    sentinel, port = _sentinel(tmp_path, binary, master.port)
    url = f"redis+sentinel://:pw@127.0.0.1:{port}/mymaster/0"
    try:
        await _until_replicated(replica.url)
        async with streams_at(url, patience_s=60.0) as streams:
            await streams.issue([make_ticket()])
            lease = await streams.claim("p", timeout_s=5.0)
            await _until_same(master.url, replica.url)
            master.kill()
            assert await streams.finish(lease, make_group()) is True
            [delivered] = await streams.read(limit=1, timeout_s=10.0)
            assert delivered.group.group_id == "t-1"
    finally:
        sentinel.terminate()
        sentinel.wait()
        replica.stop()
        master.kill()


async def test_a_cluster_that_cannot_be_reached_is_unavailable():
    """redis-py has an error of its own for it, outside its tree of errors."""
    url = f"redis+cluster://:pw@127.0.0.1:{_free_port()}"
    async with streams_at(url, patience_s=0.3) as streams:
        with pytest.raises(StreamUnavailable, match="did not answer"):
            await streams.depth()


async def test_a_server_that_is_no_cluster_is_not_waited_for(redis_server):
    url = redis_server.url.replace("redis://", "redis+cluster://").removesuffix("/0")
    async with streams_at(url, patience_s=60.0) as streams:
        with pytest.raises(StreamError, match="Cluster mode is not enabled") as refused:
            await streams.depth()
    assert not isinstance(refused.value, StreamUnavailable)


async def test_a_cluster_serves_a_run(tmp_path, redis_server, make_ticket, make_group):
    server = local_server.start(
        tmp_path / "cluster",
        # The cluster bus takes the port 10000 above.
        port=next(port for port in iter(_free_port, 0) if port < 55_000),
        password="pw",
        binary=redis_server.binary,
        extra="cluster-enabled yes\ncluster-node-timeout 2000\n",
    )
    admin = Redis.from_url(server.url)
    try:
        await admin.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        async with asyncio.timeout(20.0):
            while (await admin.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        url = f"redis+cluster://:pw@127.0.0.1:{server.port}"
        async with streams_at(url) as streams:
            await _finish(streams, make_ticket(), make_group())
            [delivered] = await streams.read(limit=1, timeout_s=5.0)
            await streams.ack([delivered.entry_id])
            assert (await streams.depth()).groups_pending == 0
    finally:
        await admin.aclose()
        server.stop()


async def test_tls_is_spoken_and_checked(tmp_path, redis_servers, make_ticket):
    certificate, key = _certificate(tmp_path)
    port = _free_port()
    extra = f"tls-port {port}\ntls-cert-file {certificate}\ntls-key-file {key}\n"
    extra += f"tls-ca-cert-file {certificate}\ntls-auth-clients no\n"
    try:
        server = local_server.start(tmp_path / "tls", password="pw", extra=extra)
    except StreamUnavailable:
        pytest.skip("this Redis was built without TLS")
    try:
        url = f"rediss://:pw@localhost:{port}/0"
        async with streams_at(f"{url}?ssl_ca_certs={certificate}") as streams:
            await streams.issue([make_ticket()])
            assert (await streams.depth()).tickets_open == 1
        async with streams_at(url, patience_s=0.5) as unsure:
            with pytest.raises(StreamError):
                await unsure.depth()
    finally:
        server.stop()


# -- URIs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://trainer", "expected redis://"),
        ("ftp://x", "expected redis://"),
        ("redis+sentinel://:secret@h:26379", "name the Sentinel service"),
        ("redis+cluster://:secret@h:port", "no host"),
    ],
)
def test_a_uri_that_cannot_be_is_refused_without_its_password(uri, says):
    with pytest.raises(SettingsError, match=says) as raised:
        open_trainer_streams(uri, run_id="run")
    assert "secret" not in str(raised.value)


async def test_memory_streams_of_one_name_are_one(make_ticket):
    one = open_trainer_streams("memory://a", run_id="run")
    same = open_streams("memory://a", run_id="run")
    other = open_trainer_streams("memory://a", run_id="other")
    assert isinstance(one, MemoryStreams)
    assert one is same
    assert one is not other


async def test_a_producer_may_be_sent_to_the_trainers_face():
    streams = open_streams("https://trainer", run_id="run", token=SecretStr("t"))
    await streams.close()


# -- helpers --------------------------------------------------------------------------------------


async def _finish(streams, ticket, group):
    await streams.issue([ticket])
    while (lease := await streams.claim("p", timeout_s=5.0)) is None:
        pass
    assert await streams.finish(lease, group)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _sentinel(folder, binary, master_port):
    port = _free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor mymaster 127.0.0.1 {master_port} 1\n"
        "sentinel auth-pass mymaster pw\n"
        "sentinel down-after-milliseconds mymaster 500\n"
        "sentinel failover-timeout mymaster 5000\n"
    )
    log = (folder / "sentinel.log").open("wb")
    with log:
        process = subprocess.Popen([str(binary), str(config), "--sentinel"], stdout=log, stderr=log)
    return process, port


async def _until_replicated(url):
    client = Redis.from_url(url)
    async with asyncio.timeout(30.0):
        while (await client.info("replication"))["master_link_status"] != "up":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await client.aclose()


async def _until_same(one, other):
    clients = [Redis.from_url(url) for url in (one, other)]
    async with asyncio.timeout(30.0):
        while True:
            master, replica = [await client.info("replication") for client in clients]
            if master["master_repl_offset"] == replica["slave_repl_offset"]:
                break
            await asyncio.sleep(0.05)
    for client in clients:
        await client.aclose()


def _certificate(folder):
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "cert.pem", folder / "key.pem"
    certificate_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_path, key_path


def test_the_uri_says_how_long_a_lease_lasts():
    streams = open_trainer_streams("redis://localhost:6379/2?lease_s=7.5", run_id="run")
    assert streams._lease_ms == 7500
    assert streams._redis.connection_pool.connection_kwargs["db"] == 2
    with pytest.raises(SettingsError, match="lease_s"):
        open_trainer_streams("redis://localhost?lease_s=soon", run_id="run")
