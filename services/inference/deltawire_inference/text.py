"""Text at the borders of the replica: the run's tokenizer, and text that comes token by token."""

import asyncio
from collections.abc import Sequence

from deltawire.rollout.tokenizer import ChatTokenizer
from deltawire.sync.reader import RunReader

_UNFINISHED = "\ufffd"
"""What a decoder shows for the first bytes of a character whose rest comes with the next token."""


class ReplicaText:
    """The run's tokenizer, loaded from the bucket on first use."""

    def __init__(self, follower: RunReader) -> None:
        self._follower = follower
        self._tokenizer: ChatTokenizer | None = None

    async def tokenizer(self) -> ChatTokenizer:
        """MalformedObject when the run carries none that can be used."""
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(self._load)
        return self._tokenizer

    def _load(self) -> ChatTokenizer:
        return ChatTokenizer.from_folder(self._follower.model_dir())


class Speech:
    """Sampled ids to text, piece by piece; ends before a stop string, holding back what may be one.

    Example: with stop ["\\n\\n"] the tokens ["a", "\\n", "\\n"] say "a", then nothing.
    """

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._ids: list[int] = []
        self._context, self._said = 0, 0
        """Ids before `_said` are text already; those from `_context` on are decoded with the new
        ones, because a tokenizer may write a token's space by what stands before it."""
        self._pending = ""
        self._cut = False

    def add(self, token_id: int) -> str:
        """The text that is certain now."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_UNFINISHED):
            return ""
        self._context, self._said = self._said, len(self._ids)
        return self._released(text)

    def end(self) -> str:
        """What was held back: no stop string after all, or bytes that stayed unfinished."""
        rest = self._released(self._new_text())
        held, self._pending = self._pending, ""
        return rest if self._cut else rest + held

    def _new_text(self) -> str:
        said = self._decode(self._ids[self._context : self._said])
        return self._decode(self._ids[self._context :])[len(said) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _released(self, text: str) -> str:
        if self._cut:
            return ""
        self._pending += text
        found = [at for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:
            self._cut = True
            return self._pending[: min(found)]
        ready = len(self._pending) - self._hold
        out, self._pending = self._pending[: max(0, ready)], self._pending[max(0, ready) :]
        return out


def spoken(tokenizer: ChatTokenizer, token_ids: Sequence[int], stops: Sequence[str]) -> str:
    """A whole completion as text, cut before the first stop string."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    found = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
