"""A Redis client from a URI: one server, a pair watched by Sentinel, or a cluster."""

from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit, urlunsplit

from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

from deltawire.protocol.errors import SettingsError

RedisClient = Redis | RedisCluster

_CONNECT_S = 5.0
_NO_SOCKET_TIMEOUT = None
"""RedisStreams puts a time limit around each call itself. With a limit of its own redis-py sends
through `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives in the same
turn of the event loop as the end of the sending."""


def redis_client(uri: str) -> RedisClient:
    """A client for one server, a Sentinel-watched pair or a cluster."""
    parts = urlsplit(uri)
    match parts.scheme:
        case "redis" | "rediss" | "unix":
            # Retries are RedisStreams' own: it knows what must be looked at again.
            return Redis.from_url(
                uri,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=_NO_SOCKET_TIMEOUT,
                socket_connect_timeout=_CONNECT_S,
                socket_keepalive=True,
            )
        case "redis+sentinel" | "rediss+sentinel":
            return _sentinel_client(parts)
        case "redis+cluster" | "rediss+cluster":
            return RedisCluster(
                startup_nodes=[ClusterNode(host, port) for host, port in _hosts(parts, 6379)],
                **_credentials(parts),
                **_connection(parts),
            )
    raise SettingsError(
        f"streams at {_without_password(parts)!r}: expected redis://, rediss://, "
        "redis+sentinel://, redis+cluster://, memory:// or, for producers, https://"
    )


async def close_client(client: RedisClient) -> None:
    """Let go of every connection, those to the Sentinels too."""
    await client.aclose()
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _sentinel_client(parts: SplitResult) -> Redis:
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise SettingsError(
            f"streams at {_without_password(parts)!r}: name the Sentinel service, "
            "redis+sentinel://host:26379/mymaster"
        )
    connection = _connection(parts)
    password = parse_qs(parts.query).get("sentinel_password", [None])[0]
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        _hosts(parts, 26379),
        sentinel_kwargs={**connection, "password": password},
        **_credentials(parts),
        **connection,
    )
    master: Redis = sentinel.master_for(service, db=int(database or 0), retry=Retry(NoBackoff(), 0))
    return master


def _connection(parts: SplitResult) -> dict[str, Any]:
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": _NO_SOCKET_TIMEOUT,
        "socket_connect_timeout": _CONNECT_S,
    }
    if parts.scheme.startswith("rediss"):
        query = parse_qs(parts.query)
        options["ssl"] = True
        options |= {
            name: query[name][0] for name in ("ssl_ca_certs", "ssl_cert_reqs") if name in query
        }
    return options


def _hosts(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """`user:password@a:1,b:2` -> [("a", 1), ("b", 2)]."""
    hosts = []
    for host in parts.netloc.rpartition("@")[2].split(","):
        name, _, port = host.partition(":")
        if not name or (port and not port.isdigit()):
            raise SettingsError(f"streams at {_without_password(parts)!r}: no host in {host!r}")
        hosts.append((name, int(port) if port else default_port))
    return hosts


def _credentials(parts: SplitResult) -> dict[str, Any]:
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    return {"username": unquote(user) or None, "password": unquote(password) or None}


def _without_password(parts: SplitResult) -> str:
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
