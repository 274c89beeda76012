"""Tell the replicas found in the registry that new weights lie in the bucket.

A notice is a hint: replicas also look by themselves, so a lost one is logged and forgotten.
"""

import asyncio
import logging
from collections.abc import Sequence

from pydantic import SecretStr

from deltawire.control.client import ServiceClient
from deltawire.protocol.chain import Link
from deltawire.protocol.control import ReplicaStatus, WeightNotice
from deltawire.protocol.errors import RemoteError

log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0
"""A replica that does not answer in this time will find the weights by itself."""


def notice_of(link: Link, *, store_uri: str, run_id: str) -> WeightNotice:
    """The coordinates of a committed link."""
    return WeightNotice(
        repo_id=store_uri,
        filename=f"{run_id}/{link.key}" if run_id else link.key,
        version=link.version,
        sha256=link.sha256,
        xet_hash=link.xet_hash,
        size=link.bytes,
    )


async def announce(
    notice: WeightNotice, replicas: Sequence[ReplicaStatus], *, token: SecretStr | None
) -> int:
    """Notify every replica that gave a URL. Returns how many took the notice."""
    told = await asyncio.gather(
        *(_tell(notice, replica.url, token) for replica in replicas if replica.url)
    )
    return sum(told)


async def _tell(notice: WeightNotice, url: str, token: SecretStr | None) -> bool:
    try:
        async with ServiceClient(url, token=token, timeout_s=_TIMEOUT_S) as client:
            receipt = await client.notify(notice)
    except RemoteError as error:
        log.info("notice not taken", extra={"url": url, "reason": str(error)})
        return False
    return receipt.accepted
