"""The policy, as an episode sees it: token ids in, completions out, wherever the engine runs.

A replica hands its own engine in; a worker beside the trainer reaches N replicas over HTTPS with
HttpPolicy, which keeps the turns of an episode on one replica (its prefix cache is there), leaves
replicas that fail, and waits for those that sleep.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import httpx
from pydantic import SecretStr, ValidationError

from deltawire.control.client import token_headers
from deltawire.protocol.control import GENERATE, SERVING_HEADER
from deltawire.protocol.errors import EngineError, RemoteError, VersionNotServed
from deltawire.protocol.generation import GenerateRequest, GenerateResponse
from deltawire.streams.backoff import backoff_s

_CONNECT_S = 10.0
_LONGEST_GENERATION_S = 1800.0
"""Of one request; the episode's own deadline is shorter and cancels it."""
_RETRY_AFTER_S = 1.0
_SESSIONS_KEPT = 4096


class PolicyClient(Protocol):
    """What episodes need of an engine, near or far."""

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Sample. VersionNotServed, with the seconds to wait, for a version not served (yet);
        other EngineErrors when this policy cannot generate at all."""
        ...


class _Replica:
    """One URL, and whether it is worth asking."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.running = 0
        self.failures = 0
        self.rests_until = 0.0

    def failed(self) -> None:
        self.rests_until = time.monotonic() + backoff_s(self.failures, first_s=0.5, longest_s=15.0)
        self.failures += 1

    def answered(self) -> None:
        self.failures, self.rests_until = 0, 0.0


class HttpPolicy:
    """PolicyClient over the `/v1/generate` of one or more replicas."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: SecretStr | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`headers` replace ours of the same name: a Hub token for a private Space's proxy.
        `patience_s`: how long to try before giving up on all replicas; an episode's deadline may
        end it sooner."""
        if not urls:
            raise ValueError("an HttpPolicy needs the URL of at least one replica")
        self._replicas = [_Replica(url) for url in urls]
        self._homes: dict[str, _Replica] = {}
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            headers={**token_headers(token), **(headers or {})},
            timeout=httpx.Timeout(_LONGEST_GENERATION_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
        )

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See PolicyClient. Moves a session to another replica when its own fails."""
        give_up_at = time.monotonic() + self._patience_s
        while True:
            replica = self._choose(request.session)
            wait_s = replica.rests_until - time.monotonic()
            if time.monotonic() + max(0.0, wait_s) > give_up_at:
                raise EngineError(
                    f"no replica answered for {self._patience_s:.0f} s: "
                    + ", ".join(r.url for r in self._replicas)
                )
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            response = await self._ask(replica, request)
            if response is not None:
                return response

    def _choose(self, session: str) -> _Replica:
        """The session's home while it is well, else the least busy of the well, else whichever is
        to be asked again first."""
        now = time.monotonic()
        home = self._homes.get(session)
        if home is not None and home.rests_until <= now:
            return home
        best = min(self._replicas, key=lambda r: (max(0.0, r.rests_until - now), r.running))
        if session:
            self._homes[session] = best
            if len(self._homes) > _SESSIONS_KEPT:
                del self._homes[next(iter(self._homes))]
        return best

    async def _ask(self, replica: _Replica, request: GenerateRequest) -> GenerateResponse | None:
        """One request. None when the replica is unreachable, waking up or broken."""
        replica.running += 1
        try:
            response = await self._http.post(
                replica.url + GENERATE,
                content=request.model_dump_json(exclude_defaults=True).encode(),
                headers={"Content-Type": "application/json"},
            )
        except httpx.RequestError:
            replica.failed()
            return None
        finally:
            replica.running -= 1
        if _wakes_up(response):
            replica.failed()
            return None
        replica.answered()
        return _parsed(response, request)

    async def close(self) -> None:
        """Let go of connections."""
        await self._http.aclose()


def _wakes_up(response: httpx.Response) -> bool:
    """5xx, too many requests, or a page for people: a Space that sleeps, builds or restarts."""
    html = response.headers.get("Content-Type", "").startswith("text/html")
    return response.status_code >= 500 or response.status_code == 429 or html


def _parsed(response: httpx.Response, request: GenerateRequest) -> GenerateResponse:
    if response.status_code == httpx.codes.CONFLICT:
        raise VersionNotServed(
            wanted=request.policy_version if request.policy_version is not None else -1,
            serving=_serving(response.headers),
            retry_after_s=_retry_after_s(response.headers),
        )
    if response.is_error:
        raise RemoteError(
            str(response.url), status=response.status_code, detail=response.text[:300]
        )
    try:
        return GenerateResponse.model_validate_json(response.content)
    except (ValidationError, json.JSONDecodeError) as error:
        raise RemoteError(
            str(response.url), status=response.status_code, detail=f"not a completion: {error}"
        ) from error


def _serving(headers: Mapping[str, str]) -> int | None:
    served = headers.get(SERVING_HEADER, "")
    return int(served) if served.isdigit() else None


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.05, float(headers.get("Retry-After", _RETRY_AFTER_S)))
    except ValueError:
        return _RETRY_AFTER_S
