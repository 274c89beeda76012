"""A reward that asks a service: a process reward model or a judge behind one POST.

Speaks what an environment service answers at `POST /score`: `{"episodes": [...]}` in, `{"scores":
[{"reward": ..., "turns": ...}]}` out. Calls of the same moment travel as one batch, are retried
when the service cannot be reached, and the same episode is asked about once.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ValidationError

from deltawire.job.reward import OnError, Score
from deltawire.job.score_messages import ScoreAnswer, ScoredEpisode, ScoreReply, ScoreRequest
from deltawire.job.transcript import Transcript
from deltawire.protocol.errors import RemoteError

if TYPE_CHECKING:
    import httpx

_BATCH_WINDOW_S = 0.005
_RETRY_WAITS_S = (0.2, 1.0)
_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_CACHED_SCORES = 4096

_Asked: TypeAlias = "tuple[ScoredEpisode, asyncio.Future[ScoreAnswer]]"


class HttpScorer:
    """One named part of the reward, judged elsewhere."""

    blocking = False

    def __init__(
        self,
        url: str,
        *,
        name: str = "scorer",
        weight: float = 1.0,
        timeout_s: float = 30.0,
        on_error: OnError = "drop",
        headers: Mapping[str, str] | None = None,
        batch: int = 32,
    ) -> None:
        self.url, self.name, self.weight = url, name, weight
        self.timeout_s, self.on_error = timeout_s, on_error
        self._headers, self._batch = dict(headers or {}), batch
        self._known: OrderedDict[str, asyncio.Future[ScoreAnswer]] = OrderedDict()
        self._waiting: list[_Asked] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def score(self, episode: Transcript) -> Score:
        """The service's score of one episode. Raises RemoteError when it cannot be had."""
        asked = ScoredEpisode.of(episode)
        key = hashlib.sha256(asked.model_dump_json().encode()).hexdigest()
        if key not in self._known:
            future: asyncio.Future[ScoreAnswer] = asyncio.get_running_loop().create_future()
            self._known[key] = future
            self._waiting.append((asked, future))
            self._start_sender()
        self._forget_old()
        try:
            return (await asyncio.shield(self._known[key])).score()
        except RemoteError:
            self._known.pop(key, None)  # a failure is not an answer worth keeping
            raise

    def _forget_old(self) -> None:
        for key in list(self._known)[: len(self._known) - _CACHED_SCORES]:
            if self._known[key].done():
                del self._known[key]

    def _start_sender(self) -> None:
        if len(self._waiting) == 1 or len(self._waiting) >= self._batch:
            task = asyncio.create_task(self._send_soon())
            self._senders.add(task)
            task.add_done_callback(self._senders.discard)

    async def _send_soon(self) -> None:
        if len(self._waiting) < self._batch:
            await asyncio.sleep(_BATCH_WINDOW_S)
        batch, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
        if self._waiting:
            self._start_sender()
        if not batch:
            return
        try:
            scores = await self._ask(ScoreRequest(episodes=[asked for asked, _ in batch]))
        except RemoteError as error:
            self._fail(batch, status=error.status, detail=error.detail)
        except Exception as error:  # noqa: BLE001 - the border of a batch: its callers wait for it
            self._fail(batch, status=0, detail=f"{type(error).__name__}: {error}")
        else:
            for (_, future), score in zip(batch, scores, strict=True):
                future.set_result(score)

    def _fail(self, batch: list[_Asked], *, status: int, detail: str) -> None:
        for _, future in batch:
            future.set_exception(RemoteError(self.url, status=status, detail=detail))
            future.exception()  # a caller that has gone needs no warning

    async def _ask(self, request: ScoreRequest) -> list[ScoreAnswer]:
        import httpx  # only jobs that use a scorer need it

        from deltawire.control.client import tls_context

        # Not httpx's own JSON, which refuses the NaN of a metric.
        body = request.model_dump_json().encode()
        headers = {"Content-Type": "application/json", **self._headers}
        status, detail = 0, ""
        async with httpx.AsyncClient(
            timeout=self.timeout_s, headers=headers, verify=tls_context()
        ) as client:
            for wait_s in (*_RETRY_WAITS_S, None):
                try:
                    answer = await client.post(self.url, content=body)
                except httpx.HTTPError as error:
                    status, detail = 0, f"{type(error).__name__}: {error}"
                else:
                    if answer.status_code == 200:
                        return self._read(answer, len(request.episodes))
                    status, detail = answer.status_code, answer.text[:200]
                    if status not in _RETRIED_STATUS:
                        break
                if wait_s is not None:
                    await asyncio.sleep(wait_s)
        raise RemoteError(self.url, status=status, detail=detail)

    def _read(self, answer: "httpx.Response", wanted: int) -> list[ScoreAnswer]:
        try:
            scores = ScoreReply.model_validate_json(answer.content).scores
        except ValidationError as error:
            raise RemoteError(self.url, status=200, detail=f"no scores: {error}") from None
        if len(scores) != wanted:
            detail = f"{wanted} episodes were sent, {len(scores)} scores came back"
            raise RemoteError(self.url, status=200, detail=detail)
        return scores
