"""A model's own chat template (jinja2, sandboxed), with the surroundings that templates of model folders expect.

A template is written by the model's author and fed by strangers, so it runs in jinja2's immutable sandbox. What it
can be given: the messages, the model's special tokens by name, `add_generation_prompt`, and the caller's own
variables. Whatever it cannot digest, or refuses by `raise_exception`, is the caller's to mend: ChatRefused.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

RESERVED_NAMES: Final = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"}
)
"""Template variables that are ours; `chat_template_kwargs` may not replace them (nor the special tokens)."""

TEMPLATE_FAULTS: Final = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template raises over messages that it was not written for."""


class ChatRefused(Exception):
    """The template cannot render these messages. The text is for the caller alone: a template may quote messages."""


class TemplateUnusable(ValueError):
    """The template itself is broken; found when the model's folder is read."""


class ChatMessage(Struct, frozen=True):
    """One message as templates see it."""

    role: str
    content: str


class ChatTemplate:
    """A compiled template. Rendering blocks and keeps nothing, so several threads may render at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: for example {"bos_token": "<s>"}. Raises TemplateUnusable."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationMark]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template: Final = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateUnusable(f"chat template: {error}") from error
        self._special_tokens: Final = dict(special_tokens)

    def reserves(self, name: str) -> bool:
        """Whether a template variable is set by us, so that a caller may not set it."""
        return name in RESERVED_NAMES or name in self._special_tokens

    def render(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, object],
        wall_clock_s: float,
        answers: bool = True,
    ) -> str:
        """The prompt text, up to where the assistant's answer begins if it `answers`. Raises ChatRefused.

        A template that prints the date gets `wall_clock_s` (seconds since 1970), in UTC.
        """
        moment = datetime.fromtimestamp(wall_clock_s, UTC)
        try:
            return self._template.render(
                {
                    **variables,
                    **self._special_tokens,
                    "messages": [{"role": message.role, "content": message.content} for message in messages],
                    "add_generation_prompt": answers,
                    "tools": None,
                    "documents": None,
                    "strftime_now": moment.strftime,
                }
            )
        except TEMPLATE_FAULTS as error:
            raise ChatRefused(f"the model's chat template does not accept these messages: {error}") from error
        except RecursionError as error:
            raise ChatRefused("the model's chat template recurses without end over these messages") from error


class _GenerationMark(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the class variable as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
