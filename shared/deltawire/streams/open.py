"""From a URI to streams.

`redis://`, `rediss://` (TLS), `redis+sentinel://:password@host:26379,host:26379/service/0`,
`redis+cluster://:password@host:6379,host:6379`, `memory://name`, and `https://trainer` for
producers that can reach nothing but the trainer's HTTPS face. `rediss+sentinel://` and
`rediss+cluster://` are the same over TLS. Options: `?ssl_ca_certs=PATH`,
`?ssl_cert_reqs=none|optional|required`, `?lease_s=45` (the same for all who take part) and, for
Sentinels that ask for one, `?sentinel_password=`.
"""

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from weakref import WeakValueDictionary

from pydantic import SecretStr

from deltawire.protocol.errors import SettingsError
from deltawire.protocol.layout import check_run_id
from deltawire.streams.base import LEASE_S, ProducerStreams
from deltawire.streams.gateway import GatewayStreams
from deltawire.streams.memory import MemoryStreams
from deltawire.streams.redis import RedisStreams
from deltawire.streams.redis_client import redis_client

SHORTEST_LEASE_S = 1.0

_in_memory: "WeakValueDictionary[str, MemoryStreams]" = WeakValueDictionary()
"""memory://name is by definition one thing per process."""


def open_streams(uri: str, *, run_id: str, token: SecretStr | str | None = None) -> ProducerStreams:
    """The producers' side of any backend. Connects lazily. Raises SettingsError for a bad URI."""
    if urlsplit(uri).scheme in ("http", "https"):
        return GatewayStreams(uri, token=token)
    return open_trainer_streams(uri, run_id=run_id)


def open_trainer_streams(uri: str, *, run_id: str) -> RedisStreams | MemoryStreams:
    """Both sides, for the process that holds the run. Raises SettingsError for a bad URI."""
    address, lease_s = _lease_of(uri)
    if urlsplit(address).scheme == "memory":
        return _in_memory.setdefault(f"{uri}#{run_id}", MemoryStreams(lease_s=lease_s))
    return RedisStreams(redis_client(address), run_id=check_run_id(run_id), lease_s=lease_s)


def _lease_of(uri: str) -> tuple[str, float]:
    """`redis://host/0?lease_s=10` -> ("redis://host/0", 10.0)."""
    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query))
    said = options.pop("lease_s", "")
    if not said:
        return uri, LEASE_S
    try:
        lease_s = float(said)
    except ValueError:
        lease_s = 0.0
    if not lease_s >= SHORTEST_LEASE_S:
        raise SettingsError(f"streams: lease_s={said!r}: expected {SHORTEST_LEASE_S:g} s or more")
    return urlunsplit(parts._replace(query=urlencode(options))), lease_s
