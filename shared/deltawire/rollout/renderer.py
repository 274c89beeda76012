"""Messages -> token ids, around sampled tokens that are never tokenised again.

A conversation of several turns is one growing list of ids: the prompt, what was sampled, what the
template and the environment put after it, what was sampled next. Decoding sampled tokens and
encoding the text again would give other ids wherever tokens merge across a boundary; training on
those would be training on tokens that nobody sampled. So only the text *between* completions is
ever encoded, and what was sampled stands as it was.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Protocol

from deltawire.protocol.errors import MalformedObject

Message = Mapping[str, str]
"""`{"role": ..., "content": ...}`"""

_STAND_IN = "deltawirestandin7f3ab1"
"""Takes the place of a sampled message when the text after it is rendered."""


class Tokenizer(Protocol):
    """The part of a chat tokenizer that is used; transformers' tokenizers fit."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    def apply_chat_template(
        self, messages: Sequence[Message], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Renderer:
    """A chat template in both directions. Holds no conversation: ids go in and out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._closing_ids = self._after_a_turn([], opens_next=False)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the policy speaks.

        Example with ChatML: ``[user: hi]`` is ``<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>
        assistant\\n``.
        """
        return self._encode(self._render(messages, opens_next=True))

    def continuation(self, sampled_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids to put after a sampled turn so that the policy may speak again.

        They close the turn, unless the sampled ids have closed it themselves, then hold the new
        messages and open the next turn.
        """
        after = self._after_a_turn(messages, opens_next=True)
        return after[_overlap(sampled_ids, after, special=self._tokenizer.all_special_ids) :]

    def text(self, sampled_ids: Sequence[int]) -> str:
        """What the policy said, for the environment: without special tokens."""
        return self._tokenizer.decode(list(sampled_ids), skip_special_tokens=True)

    def token_at(self, sampled_ids: Sequence[int], character: int) -> int:
        """Index of the sampled token that holds a character of the turn's text."""
        return bisect.bisect_right(
            range(len(sampled_ids) - 1),
            character,
            key=lambda n: len(self.text(sampled_ids[: n + 1])),
        )

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn: end-of-sequence, and the special token that closes a turn."""
        special = set(self._tokenizer.all_special_ids)
        closing = [i for i in self._closing_ids[:1] if i in special]
        eos = self._tokenizer.eos_token_id
        return list(dict.fromkeys([*closing, *([] if eos is None else [eos])]))

    def _after_a_turn(self, messages: Sequence[Message], *, opens_next: bool) -> list[int]:
        """Ids of the text that the template puts after an assistant's message.

        The history before it is a stand-in: rendering the real one would need the sampled ids as
        text, and templates that rewrite history (dropping thoughts, say) would no longer continue
        the tokens that the policy really saw.
        """
        spoken = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _STAND_IN},
            *messages,
        ]
        _, found, after = self._render(spoken, opens_next=opens_next).rpartition(_STAND_IN)
        if not found:
            raise MalformedObject("the chat template leaves out what the assistant said")
        return self._encode(after)

    def _render(self, messages: Sequence[Message], *, opens_next: bool) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=opens_next,
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def _overlap(sampled: Sequence[int], after: Sequence[int], *, special: Sequence[int]) -> int:
    """How many ids at the end of `sampled` are the ones `after` begins with.

    A special token is among them, or it is only text that looks like the template's.
    """
    for length in range(min(len(sampled), len(after)), 0, -1):
        if list(sampled[-length:]) == list(after[:length]):
            return length if set(special) & set(after[:length]) else 0
    return 0
