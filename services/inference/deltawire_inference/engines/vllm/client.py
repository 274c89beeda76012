"""HTTP to a vLLM child over its socket: every call has a deadline and a checked status.

`VllmClient` is for the event loop. `WorkerCalls` is for the staging thread: it calls our worker
extension on every rank and waits for the files that its jobs leave.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from deltawire.protocol import errors
from deltawire.protocol.errors import (
    DeltawireError,
    EngineError,
    MalformedMessage,
    ReplicaBroken,
)
from deltawire_inference.vllm_plugin.jobs import JobReport
from deltawire_inference.vllm_plugin.swap_route import APPLY_METHOD, SWAP_PATH, SwapOrder

_CONNECT_S = 5.0
_CONTROL_S = 120.0
_GENERATE_S = 3600.0
_WATCH_S = 0.003
_BASE_URL = "http://vllm"
_GENERATE, _COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_WRONG_METHOD = 405
_CALLERS_FAULT = frozenset({400, 413, 422})
PauseMode = Literal["keep", "wait", "abort"]
Health = Literal["well", "silent", "dead"]
"""dead: nobody listens, or vLLM says itself that its engine has ended (503)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapAnswer:
    """What every rank said of a swap."""

    results: Sequence[Mapping[str, Any]]
    pause_s: float
    """From the end of the last step under the old weights until generation may go on."""

    @property
    def refusals(self) -> list[str]:
        """Why ranks wrote nothing."""
        return [str(result["refused"]) for result in self.results if result.get("refused")]

    @property
    def ranks_disagree(self) -> bool:
        """Some wrote and some did not: what is live is no version. vLLM is still paused then."""
        return 0 < len(self.refusals) < len(self.results)


class VllmClient:
    """Calls one child. EngineError when it fails, MalformedMessage when a request is wrong."""

    def __init__(self, socket: Path) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=_no_limits()),
            base_url=_BASE_URL,
            timeout=httpx.Timeout(_CONTROL_S, connect=_CONNECT_S),
        )

    async def healthy(self) -> bool:
        """Whether it answers."""
        return await self.health() == "well"

    async def health(self) -> Health:
        """GET /health. A server that is only slow is no dead one."""
        try:
            answer = await self._http.get("/health", timeout=_CONNECT_S)
        except httpx.ConnectError:  # on this machine: nobody listens
            return "dead"
        except httpx.HTTPError:
            return "silent"
        return "well" if answer.is_success else "dead"

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /inference/v1/generate: token ids in, token ids out."""
        return await self._post(_GENERATE, json=body, timeout_s=_GENERATE_S)

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """The same, as the data lines of its event stream, without the closing `[DONE]`."""
        timeout = httpx.Timeout(_GENERATE_S, connect=_CONNECT_S)
        try:
            async with self._http.stream("POST", _GENERATE, json=body, timeout=timeout) as response:
                if response.is_error:
                    await response.aread()
                    raise _refusal(_GENERATE, response)
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield line.removeprefix("data: ")
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM {_GENERATE}: {type(error).__name__} {error}") from error

    async def score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /v1/completions, for prompt logprobs."""
        return await self._post(_COMPLETIONS, json=body, timeout_s=_GENERATE_S)

    async def has_swap_route(self) -> bool:
        """Whether our route for a whole swap is there; endpoint plugins came late to vLLM."""
        try:
            return (await self._http.get(SWAP_PATH)).status_code == _WRONG_METHOD
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM {SWAP_PATH}: {type(error).__name__} {error}") from error

    async def swap(self, order: SwapOrder) -> SwapAnswer:
        """POST /deltawire/swap: everything between two steps in one request."""
        answer = await self._post(SWAP_PATH, json=order.model_dump(), timeout_s=_GENERATE_S)
        return SwapAnswer(results=answer["results"], pause_s=answer["pause_s"])

    async def swap_by_parts(self, order: SwapOrder) -> SwapAnswer:
        """The same through vLLM's own routes."""
        await self.pause(order.mode, clear_cache=order.clear_cache)
        started = time.monotonic()
        results = await self.call_workers(APPLY_METHOD, order.key)
        answer = SwapAnswer(results=results, pause_s=0.0)
        if not answer.refusals:
            await self.set_version(order.label)
        if not answer.ranks_disagree:
            await self.resume()
        return replace(answer, pause_s=time.monotonic() - started)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop making tokens; returns when the last step has ended."""
        query = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        await self._post("/pause", params=query, timeout_s=_GENERATE_S)

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def set_version(self, label: str) -> None:
        """What tokens made from now on are labelled with."""
        await self._post("/update_weight_version", json={"new_version": label})

    async def call_workers(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Call our worker extension on every rank, between two steps."""
        answer = await self._post("/collective_rpc", json={"method": method, "args": args})
        return list(answer["results"])

    async def checksums(self) -> dict[str, str]:
        """POST /weight_checker: sha256 of every runtime parameter."""
        answer = await self._post("/weight_checker", json={"action": "checksum"})
        return dict(answer["checksums"])

    async def load_adapter(self, name: str, path: Path) -> None:
        """POST /v1/load_lora_adapter."""
        body = {"lora_name": name, "lora_path": str(path)}
        await self._post("/v1/load_lora_adapter", json=body)

    async def unload_adapter(self, name: str) -> None:
        """POST /v1/unload_lora_adapter."""
        await self._post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def close(self) -> None:
        """Let go of the socket."""
        await self._http.aclose()

    async def _post(
        self,
        path: str,
        *,
        json: object = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _CONTROL_S,
    ) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            response = await self._http.post(path, json=json, params=params, timeout=timeout)
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM {path}: {type(error).__name__} {error}") from error
        return _answer(path, response)


class WorkerCalls:
    """Synchronous calls of the worker extension, for one staging at a time."""

    def __init__(
        self,
        socket: Path,
        folder: Path,
        *,
        ranks: int,
        timeout_s: float,
        alive: Callable[[], bool],
    ) -> None:
        self.folder = folder
        """Where plans, values and reports lie; on memory if the machine has /dev/shm."""
        self.ranks = ranks
        self._alive = alive
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket), limits=_no_limits()),
            base_url=_BASE_URL,
            timeout=httpx.Timeout(_CONTROL_S, connect=_CONNECT_S),
        )

    def call(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Call every rank; one answer per rank, in rank order."""
        try:
            response = self._http.post("/collective_rpc", json={"method": method, "args": args})
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM {method}: {type(error).__name__} {error}") from error
        return list(_answer(method, response)["results"])

    def run_job(self, method: str, *args: object) -> None:
        """Start a job on every rank and wait until all have reported.

        Raises:
            DeltawireError: What a rank's job raised, as its own class.
            ReplicaBroken: The child ended meanwhile.
        """
        number = next(self._numbers)
        self.call(method, *args, str(self.folder / f"report-{number}-{{rank}}.json"))
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self.ranks):
            path = self.folder / f"report-{number}-{rank}.json"
            while (report := JobReport.read(path)) is None:
                if not self._alive():
                    raise ReplicaBroken(f"vLLM ended during {method}")
                if time.monotonic() > deadline:
                    raise EngineError(f"{method}: no report within {self._timeout_s:.0f} s")
                time.sleep(_WATCH_S)
            path.unlink()
            if report.error:
                raise _error_named(report.error_type)(f"rank {rank}: {report.error}")

    def paths(self, pattern: str) -> Sequence[Path]:
        """`pattern` with `{rank}` filled in, per rank."""
        return [Path(pattern.replace("{rank}", str(rank))) for rank in range(self.ranks)]

    def close(self) -> None:
        """Let go of the socket."""
        self._http.close()


def _no_limits() -> httpx.Limits:
    """vLLM queues by itself: a request must never wait for a connection of ours.

    None is kept: vLLM closes after each 500, and a socket on this machine opens in no time.
    """
    return httpx.Limits(max_connections=None, max_keepalive_connections=0)


def _answer(path: str, response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise _refusal(path, response)
    if not response.headers.get("content-type", "").startswith("application/json"):
        return {}
    answer = response.json()
    return answer if isinstance(answer, dict) else {}


def _refusal(path: str, response: httpx.Response) -> DeltawireError:
    """Whose fault it is: a prompt that is too long is the caller's."""
    text = f"vLLM {path} answered {response.status_code}: {response.text[:400]}"
    if path in (_GENERATE, _COMPLETIONS) and response.status_code in _CALLERS_FAULT:
        return MalformedMessage(text)
    return EngineError(text)


def _error_named(name: str) -> type[Exception]:
    """The class of the error tree a worker named; EngineError for any other."""
    found = getattr(errors, name, EngineError)
    simple = isinstance(found, type) and issubclass(found, DeltawireError)
    return found if simple and found.__init__ is Exception.__init__ else EngineError
