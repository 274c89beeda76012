"""What a running trainer answers to the commands that look at a run."""

import os
from typing import Any

import httpx
from pydantic import SecretStr

from deltawire.control.client import token_headers
from deltawire.protocol.errors import RemoteError

_TIMEOUT_S = 20.0


def is_url(source: str) -> bool:
    """Whether a source is a trainer's address and no run folder."""
    return source.startswith(("http://", "https://"))


def get_json(url: str, path: str) -> Any:
    """What a trainer answers; the token is read from DELTAWIRE_TOKEN. Raises RemoteError."""
    token = os.environ.get("DELTAWIRE_TOKEN")
    headers = token_headers(SecretStr(token) if token else None)
    try:
        response = httpx.get(url.rstrip("/") + path, headers=headers, timeout=_TIMEOUT_S)
        if response.is_error:
            raise RemoteError(url, status=response.status_code, detail=response.text[:300])
        return response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise RemoteError(url, status=0, detail=f"{type(error).__name__}: {error}") from error
