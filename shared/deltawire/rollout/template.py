"""A model's chat template: messages -> text, as transformers renders them.

Templates come from a bucket, so they run in jinja's immutable sandbox.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from deltawire.protocol.errors import MalformedMessage, MalformedObject

_RAISED = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
"""By templates, of messages that they do not take."""


class ChatTemplate:
    """One template, ready to render. `special` maps names such as eos_token to their text."""

    def __init__(self, text: str, *, special: Mapping[str, str]) -> None:
        """Raises MalformedObject for a text that is no template."""
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise MalformedObject(f"the chat template cannot be read: {error}") from error
        self._special = dict(special)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        """The conversation as text. Raises MalformedMessage for one that the template refuses."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except _RAISED as error:
            raise MalformedMessage(
                f"the model's chat template refuses the conversation: {error}"
            ) from error


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.globals.update(functions)
    return environment


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Not jinja's own, which escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks assistant text in some templates; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
