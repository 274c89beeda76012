"""KV of token prefixes, kept so that equal beginnings are computed once.

Serves groups (n completions of one prompt), prompts with a common head, and the next turn of an
episode alike. Everything in it was computed by one policy version: it is cleared at every swap.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """token_ids [length], kv [layers, 2, heads, length, head_dim]."""

    adapter: str | None
    """KV of one adapter is of no use to another."""
    token_ids: np.ndarray
    kv: torch.Tensor


class PrefixCache:
    """The most recently used prefixes, up to `max_bytes` of KV."""

    def __init__(self, *, max_bytes: int, token_bytes: int) -> None:
        self._max_tokens = max_bytes // max(1, token_bytes)
        self._entries: OrderedDict[int, Prefix] = OrderedDict()
        self._next_id = 0
        self._tokens = 0

    def match(
        self, token_ids: np.ndarray, *, adapter: str | None = None
    ) -> tuple[int, torch.Tensor | None]:
        """Length of the longest kept beginning of `token_ids`, and the KV that holds it."""
        best, best_id = 0, -1
        for entry_id, entry in self._entries.items():
            if entry.adapter != adapter:
                continue
            length = common_length(entry.token_ids, token_ids)
            if length > best:
                best, best_id = length, entry_id
        if best_id < 0:
            return 0, None
        self._entries.move_to_end(best_id)
        return best, self._entries[best_id].kv

    def holds(self, token_ids: np.ndarray, *, adapter: str | None = None) -> bool:
        """Whether all of `token_ids` is kept already."""
        return self.match(token_ids, adapter=adapter)[0] == len(token_ids)

    def add(self, token_ids: np.ndarray, kv: torch.Tensor, *, adapter: str | None = None) -> None:
        """Keep a prefix; shorter ones that it contains go, the least recently used ones too."""
        contained = [
            entry_id
            for entry_id, entry in self._entries.items()
            if entry.adapter == adapter
            and common_length(entry.token_ids, token_ids) == len(entry.token_ids)
        ]
        for entry_id in contained:
            self._drop(entry_id)
        if len(token_ids) > self._max_tokens:
            return
        self._entries[self._next_id] = Prefix(adapter=adapter, token_ids=token_ids, kv=kv)
        self._next_id += 1
        self._tokens += len(token_ids)
        while self._tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._entries.clear()
        self._tokens = 0

    def _drop(self, entry_id: int) -> None:
        self._tokens -= len(self._entries.pop(entry_id).token_ids)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if different.size else length


def as_tokens(token_ids: Sequence[int]) -> np.ndarray:
    """[length] int64."""
    return np.asarray(token_ids, dtype=np.int64)
