"""Who runs in the next step: continuous batching over cache rows.

Decoding rows always run; waiting rows join when there is room. A row whose beginning another row is
computing right now waits for it and then starts from its KV, so a group's prompt is computed once.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from deltawire_inference.engines.torch.kv import KVCache
from deltawire_inference.engines.torch.prefixes import PrefixCache, as_tokens, common_length
from deltawire_inference.engines.torch.row import Row

_WORTH_WAITING_TOKENS = 8
"""A row waits for a neighbour's prefix when that saves more tokens than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part of a row that the next step computes: its next `count` pending tokens."""

    row: Row
    count: int

    @property
    def draws(self) -> bool:
        """Whether the step reaches the row's last token, so that the next one is drawn."""
        return self.count == self.row.pending


class Scheduler:
    """Waiting and running rows. running[i] holds cache row i."""

    def __init__(
        self, cache: KVCache, prefixes: PrefixCache, *, max_rows: int, max_step_tokens: int
    ) -> None:
        self._cache, self._prefixes = cache, prefixes
        self._max_rows, self._max_step_tokens = max_rows, max_step_tokens
        self.running: list[Row] = []
        self.waiting: deque[Row] = deque()

    def add(self, rows: Iterable[Row]) -> None:
        """Let rows wait their turn."""
        self.waiting.extend(rows)

    def admit(self) -> None:
        """Move waiting rows to free cache rows, oldest first."""
        prefilling = [(row, as_tokens(row.token_ids)) for row in self.running if row.pending > 1]
        deferred: list[Row] = []
        while self.waiting and len(self.running) < self._max_rows:
            row = self.waiting.popleft()
            token_ids = as_tokens(row.token_ids)
            # The last token is computed in any case: its logits draw the next one.
            adapter = row.request.adapter
            hit, kv = self._prefixes.match(token_ids[:-1], adapter=adapter)
            soon = max(
                (
                    common_length(other_ids, token_ids)
                    for other, other_ids in prefilling
                    if other.request.adapter == adapter
                ),
                default=0,
            )
            if soon > hit + _WORTH_WAITING_TOKENS:
                deferred.append(row)
                continue
            row.slot, row.cached = len(self.running), hit
            self.running.append(row)
            self._cache.reserve(rows=len(self.running), length=len(token_ids))
            if kv is not None:
                self._cache.put(row.slot, kv, hit)
            if row.pending > 1:
                prefilling.append((row, token_ids))
        self.waiting.extendleft(reversed(deferred))

    def shares(self) -> list[Share]:
        """What the next step computes, in order of cache rows, within the token budget."""
        budget = self._max_step_tokens - len(self.running)
        shares: list[Share] = []
        for row in self.running:
            extra = min(row.pending - 1, max(0, budget))
            budget -= extra
            shares.append(Share(row=row, count=1 + extra))
        longest = max((share.row.cached + share.count for share in shares), default=0)
        self._cache.reserve(rows=len(self.running), length=longest)
        return shares

    def computed(self, share: Share, *, version: int) -> None:
        """A step has put the share's KV into the cache."""
        row = share.row
        row.kv_versions.add(version)
        row.cached += share.count
        if row.pending == 0 and not row.prompt_kept:
            row.prompt_kept = True
            self._keep(row)

    def leave(self, row: Row, *, keep: bool = False) -> None:
        """Take a row out, wherever it is. The last cache row fills the hole."""
        if row.slot is None:
            if row in self.waiting:
                self.waiting.remove(row)
            return
        if keep:
            self._keep(row)
        last = self.running.pop()
        if last is not row:
            assert last.slot is not None
            self._cache.move(last.slot, row.slot, last.cached)
            last.slot = row.slot
            self.running[row.slot] = last
        row.leave_cache()

    def restart(self) -> int:
        """Send running rows back to the front of the queue; how many tokens lose their KV."""
        lost = sum(row.cached for row in self.running)
        for row in self.running:
            row.leave_cache()
            row.prompt_kept = False
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        return lost

    def _keep(self, row: Row) -> None:
        """Offer a row's KV to the prefix cache, unless versions are mixed in it."""
        token_ids: np.ndarray = as_tokens(row.token_ids[: row.cached])
        adapter = row.request.adapter
        if len(row.kv_versions) != 1 or self._prefixes.holds(token_ids, adapter=adapter):
            return
        assert row.slot is not None
        self._prefixes.add(token_ids, self._cache.take(row.slot, row.cached), adapter=adapter)
