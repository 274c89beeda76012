"""The engine without threads: rows in, one step at a time, weights swapped between two steps.

Everything here runs on the engine's thread. `loop.py` drives it; `engine.py` is the async face.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deltawire_inference.engines.base import SwapMode
from deltawire_inference.engines.torch.adapters import AdapterBank, Use
from deltawire_inference.engines.torch.attention import Step
from deltawire_inference.engines.torch.kv import KVCache, KVShape
from deltawire_inference.engines.torch.plan import StepPlan, Stretch, plan_step
from deltawire_inference.engines.torch.prefixes import PrefixCache
from deltawire_inference.engines.torch.row import Row
from deltawire_inference.engines.torch.sampler import draw
from deltawire_inference.engines.torch.scheduler import Scheduler, Share

_SCORE_TOKENS = 512
"""Tokens scored by one forward pass: bounds the logits in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the engine takes on."""

    max_rows: int = 64
    """Completions that run at once."""
    max_step_tokens: int = 4096
    """Tokens of one forward pass, prefill and decode together."""
    max_length: int = 4096
    """Tokens of one sequence, prompt included."""
    prefix_bytes: int = 512 * 2**20
    """KV kept for prefixes beside the running rows."""
    adapters: int = 8
    """LoRA adapters that can be asked for at a time."""


class EngineCore:
    """A model, its KV, and who is running on it."""

    def __init__(self, model: nn.Module, shape: KVShape, *, limits: Limits, version: int) -> None:
        self._model, self._shape = model, shape
        self._cache = KVCache(shape)
        self._prefixes = PrefixCache(max_bytes=limits.prefix_bytes, token_bytes=shape.token_bytes)
        self._scheduler = Scheduler(
            self._cache,
            self._prefixes,
            max_rows=limits.max_rows,
            max_step_tokens=limits.max_step_tokens,
        )
        self.adapters = AdapterBank(model, limit=limits.adapters)
        self.version = version
        self.admits = True
        """False while draining: waiting rows stay outside."""

    @property
    def running(self) -> Sequence[Row]:
        """Rows that hold KV."""
        return self._scheduler.running

    @property
    def waiting(self) -> Sequence[Row]:
        """Rows that do not run yet, or not at the moment."""
        return self._scheduler.waiting

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.running or (self.waiting and self.admits))

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows on."""
        self._scheduler.add(rows)

    def remove(self, rows: Sequence[Row]) -> None:
        """Forget rows, finished or not."""
        for row in rows:
            self._scheduler.leave(row)

    def step(self) -> list[Row]:
        """One forward pass; the rows that got a token. EngineError when logits are no numbers."""
        if self.admits:
            self._scheduler.admit()
        shares = self._scheduler.shares()
        if not shares:
            return []
        self.adapters.uses = _uses(shares)
        logits = self._forward(self._plan(shares))
        drawing = [i for i, share in enumerate(shares) if share.draws]
        rows = [shares[i].row for i in drawing]
        for share in shares:
            self._scheduler.computed(share, version=self.version)
        if not rows:
            return []
        drawn = draw(logits[drawing], [row.ask() for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            row.append(token, version=self.version)
            if row.finish_reason is not None:
                # A session says that the next turn will come with these tokens as its prefix.
                self._scheduler.leave(row, keep=bool(row.request.session))
        return rows

    def swap(
        self, enter_weights: Callable[[], None], *, mode: SwapMode, version: int
    ) -> tuple[list[Row], int]:
        """Let new weights in. When `enter_weights` raises, nothing has changed.

        Returns the rows that end with it (mode abort, or pinned to the version that left), and how
        many tokens lost their KV (mode keep).
        """
        enter_weights()
        self._prefixes.clear()
        begun = [*self.running, *(row for row in self.waiting if row.draws)]
        ending = [row for row in begun if mode == "abort"]
        ending += [
            row
            for row in [*self.running, *self.waiting]
            if row.request.policy_version not in (None, version) and row not in ending
        ]
        for row in ending:
            row.finish_reason = "abort"
        self.remove(ending)
        self.version = version
        return ending, self._scheduler.restart() if mode in ("keep", "drain") else 0

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token given those before it, untempered; 0.0 for the first."""
        self.adapters.uses = ()
        cache = KVCache(self._shape)
        cache.reserve(rows=1, length=len(token_ids))
        logprobs = [0.0]
        for begin in range(0, len(token_ids) - 1, _SCORE_TOKENS):
            chunk = token_ids[begin : min(begin + _SCORE_TOKENS, len(token_ids) - 1)]
            stretch = Stretch(slot=0, start=begin, count=len(chunk))
            plan = plan_step([stretch], chunk, device=self._shape.device)
            logits = self._forward(plan, cache=cache, keep=torch.arange(len(chunk)))
            following = torch.tensor(token_ids[begin + 1 : begin + 1 + len(chunk)])[:, None]
            of_all = torch.log_softmax(logits.float(), dim=-1)
            logprobs += of_all.gather(1, following.to(of_all.device))[:, 0].tolist()
        return logprobs

    def _plan(self, shares: Sequence[Share]) -> StepPlan:
        stretches = []
        token_ids: list[int] = []
        for share in shares:
            row = share.row
            assert row.slot is not None
            stretches.append(Stretch(slot=row.slot, start=row.cached, count=share.count))
            token_ids += row.token_ids[row.cached : row.cached + share.count]
        return plan_step(stretches, token_ids, device=self._shape.device)

    def _forward(
        self,
        plan: StepPlan,
        *,
        cache: KVCache | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] of each row's last new token, or of the positions in `keep`."""
        logits: torch.Tensor = self._model(
            input_ids=plan.input_ids,
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=plan.last if keep is None else keep,
            step=Step(plan=plan, cache=cache or self._cache),
        ).logits[0]
        return logits


def _uses(shares: Sequence[Share]) -> list[Use]:
    """Where on the flat axis which adapter applies."""
    uses = []
    begin = 0
    for share in shares:
        tokens = slice(begin, begin + share.count)
        begin += share.count
        if share.row.adapter is not None:
            uses.append(Use(adapter=share.row.adapter, tokens=tokens))
    return uses
