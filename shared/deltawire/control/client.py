"""Talk to a service: one call, a timeout, a checked status."""

import ssl
from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, SecretStr, ValidationError

from deltawire.protocol.control import (
    READYZ,
    STATUS,
    TOKEN_HEADER,
    UPDATE_WEIGHTS,
    NoticeReceipt,
    WeightNotice,
)
from deltawire.protocol.errors import RemoteError

Model = TypeVar("Model", bound=BaseModel)

_TIMEOUT_S = 10.0


@cache
def tls_context() -> ssl.SSLContext:
    """One for all clients of the process: to read the certificates anew takes 30 ms of processor
    time, in which an event loop stands still, for every client made for one call."""
    return httpx.create_ssl_context()


def token_headers(token: SecretStr | None) -> dict[str, str]:
    """Headers that carry the token to a peer: both, so that a proxy may use up the first."""
    if token is None:
        return {}
    secret = token.get_secret_value()
    return {"Authorization": f"Bearer {secret}", TOKEN_HEADER: secret}


class ServiceClient:
    """A peer's REST face. Raises RemoteError for every answer that is not the agreed one."""

    def __init__(
        self,
        url: str,
        *,
        token: SecretStr | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`headers` replace ours of the same name: a Hub token for a private Space's proxy.

        Raises RemoteError for an address that is no URL: peers tell each other's.
        """
        self.url = url.rstrip("/")
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={**token_headers(token), **(headers or {})},
                timeout=timeout_s,
                transport=transport,
                verify=tls_context(),
            )
        except httpx.InvalidURL as error:
            raise RemoteError(url, status=0, detail=f"not a URL: {error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, answer: type[Model]) -> Model:
        """GET a typed answer."""
        return self._parse(await self._send("GET", path), answer)

    async def post(
        self, path: str, answer: type[Model], *, body: BaseModel | Mapping[str, Any] | None = None
    ) -> Model:
        """POST, and a typed answer."""
        return self._parse(await self._send("POST", path, body), answer)

    async def notify(self, notice: WeightNotice) -> NoticeReceipt:
        """Tell a replica that new weights lie in the bucket."""
        return await self.post(UPDATE_WEIGHTS, NoticeReceipt, body=notice)

    async def status(self, answer: type[Model]) -> Model:
        """GET /status."""
        return await self.get(STATUS, answer)

    async def unready(self) -> str:
        """Why the service cannot work yet; "" when it can."""
        try:
            response = await self._http.get(READYZ)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code == 200:
            return ""
        try:
            return str(response.json()["reason"])
        except (ValueError, KeyError, TypeError):
            return f"answers {response.status_code} and no JSON: waking up?"

    async def _send(
        self, method: str, path: str, body: BaseModel | Mapping[str, Any] | None = None
    ) -> httpx.Response:
        content = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
        try:
            response = await self._http.request(method, path, json=content)
        except httpx.HTTPError as error:
            raise RemoteError(
                self.url + path, status=0, detail=f"{type(error).__name__}: {error}"
            ) from error
        if response.is_error:
            raise RemoteError(
                self.url + path, status=response.status_code, detail=response.text[:500]
            )
        return response

    def _parse(self, response: httpx.Response, answer: type[Model]) -> Model:
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise RemoteError(
                str(response.url),
                status=response.status_code,
                detail=f"not a {answer.__name__}: {error.errors(include_url=False)[:3]}",
            ) from error
