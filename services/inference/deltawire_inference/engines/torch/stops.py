"""When a completion ends: end-of-sequence ids, the request's stop ids and strings, its length."""

from collections.abc import Sequence
from typing import Protocol

from deltawire.protocol.errors import MalformedMessage
from deltawire.protocol.generation import FinishReason, Sampling

_TAIL_TOKENS = 8
"""Beside the stop string's own length: tokens decoded to find one that crosses a token border."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Ids to text."""
        ...


class StopRule:
    """Of one completion. The stopping token is part of the completion."""

    def __init__(
        self, sampling: Sampling, *, eos_ids: frozenset[int], max_new: int, decoder: Decoder | None
    ) -> None:
        if any(sampling.stop) and decoder is None:
            raise MalformedMessage("stop strings need a tokenizer, and this run carries none")
        own = frozenset(sampling.stop_token_ids)
        self._ids = own if sampling.ignore_eos else own | eos_ids
        self._strings = tuple(text for text in sampling.stop if text)
        self._max_new = max_new
        self._decoder = decoder
        self._tail = _TAIL_TOKENS + max((len(text) for text in self._strings), default=0)

    def reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Why a completion ends after these tokens; None while it goes on."""
        if token_ids[-1] in self._ids or self._ends_in_string(token_ids):
            return "stop"
        return "length" if len(token_ids) >= self._max_new else None

    def _ends_in_string(self, token_ids: Sequence[int]) -> bool:
        if not self._strings or self._decoder is None:
            return False
        tail = self._decoder.decode(token_ids[-self._tail :], skip_special_tokens=True)
        return any(text in tail for text in self._strings)
