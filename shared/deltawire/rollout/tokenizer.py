"""A chat tokenizer from a model folder: tokenizer.json and its chat template, nothing heavier.

Names and signatures are those of transformers' tokenizers, so that either can be handed to the
renderer.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from deltawire.protocol.errors import MalformedMessage, MalformedObject
from deltawire.rollout.template import ChatTemplate

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTokenizer:
    """Text <-> ids, and messages -> text by the model's own template."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, template: str, special: Mapping[str, str]
    ) -> None:
        """`special` maps names such as eos_token to their text, as templates use them. Raises
        MalformedObject for a text that is no template."""
        self._tokenizer = tokenizer
        self._special = dict(special)
        self._template = ChatTemplate(template, special=special)

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTokenizer":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises MalformedObject naming the file that is missing or wrong.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise MalformedObject(f"{folder}/tokenizer.json cannot be read: {error}") from error
        config = _config(folder / "tokenizer_config.json")
        template = _template_text(folder / "chat_template.jinja", config)
        special = {name: _text(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        return cls(tokenizer, template=template, special=special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text. `tokenize` exists for transformers' signature; only False.

        Raises MalformedMessage when ids are asked for, or when the template refuses the messages.
        """
        if tokenize:
            raise MalformedMessage(
                "a ChatTokenizer renders text: call apply_chat_template(..., tokenize=False), then "
                "encode() what it returns"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; special tokens written in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, when the model names one."""
        eos = self._special.get("eos_token")
        return None if eos is None else self._tokenizer.token_to_id(eos)

    @cached_property
    def all_special_ids(self) -> list[int]:
        """Ids of tokens that are not text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token_id for token_id, token in added.items() if token.special]


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise MalformedObject(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise MalformedObject(f"{path} is not a JSON object")
    return config


def _template_text(path: Path, config: Mapping[str, Any]) -> str:
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise MalformedObject(
            f"{path.parent} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): use an instruction-tuned model, or add one"
        )
    return template


def _text(token: str | Mapping[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]
