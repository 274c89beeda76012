"""From a URI to streams.

`redis://`, `rediss://` (TLS), `redis+sentinel://:password@host:26379,host:26379/service/0`,
`redis+cluster://:password@host:6379,host:6379`, `memory://name`, and `https://trainer` for
producers that can reach nothing but the trainer's HTTPS face. `rediss+sentinel://` and
`rediss+cluster://` are the same over TLS. Options: `?ssl_ca_certs=PATH`,
`?ssl_cert_reqs=none|optional|required` and, for Sentinels that ask for one, `?sentinel_password=`.
"""

from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from pydantic import SecretStr

from deltawire.protocol.layout import check_run_id
from deltawire.streams.base import ProducerStreams
from deltawire.streams.gateway import GatewayStreams
from deltawire.streams.memory import MemoryStreams
from deltawire.streams.redis import RedisStreams
from deltawire.streams.redis_client import redis_client

_in_memory: "WeakValueDictionary[str, MemoryStreams]" = WeakValueDictionary()
"""memory://name is by definition one thing per process."""


def open_streams(
    uri: str,
    *,
    run_id: str,
    token: SecretStr | str | None = None,
    lease_s: float = 45.0,
    max_deliveries: int = 4,
) -> ProducerStreams:
    """The producers' side of any backend. Connects lazily. Raises SettingsError for a bad URI."""
    if urlsplit(uri).scheme in ("http", "https"):
        return GatewayStreams(uri, token=token)
    return open_trainer_streams(uri, run_id=run_id, lease_s=lease_s, max_deliveries=max_deliveries)


def open_trainer_streams(
    uri: str, *, run_id: str, lease_s: float = 45.0, max_deliveries: int = 4
) -> RedisStreams | MemoryStreams:
    """Both sides, for the process that holds the run. Raises SettingsError for a bad URI."""
    if urlsplit(uri).scheme == "memory":
        return _in_memory.setdefault(
            f"{uri}#{run_id}", MemoryStreams(lease_s=lease_s, max_deliveries=max_deliveries)
        )
    return RedisStreams(
        redis_client(uri),
        run_id=check_run_id(run_id),
        lease_s=lease_s,
        max_deliveries=max_deliveries,
    )
