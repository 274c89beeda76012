"""What a peer's address may be: it comes from a setting, or from whoever registered."""

import pytest

from deltawire.control.client import ServiceClient
from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import RemoteError


@pytest.mark.parametrize("url", ["http://peer/\n", "http://\x00", "http://ü..", "peer", ""])
async def test_an_address_that_is_none_is_a_remote_error_that_names_it(url: str) -> None:
    with pytest.raises(RemoteError) as caught:
        async with ServiceClient(url) as client:
            await client.status(ReplicaStatus)
    assert caught.value.status == 0
    assert caught.value.url.startswith(url.rstrip("/"))
