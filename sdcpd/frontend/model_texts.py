"""The text sides of the models that clients may name, and the way of a prompt into tokens."""

from collections.abc import Mapping
from typing import Final

from sdcpd.frontend.chat_template import ChatRefused
from sdcpd.frontend.errors import invalid, model_not_found
from sdcpd.frontend.openai import Conversation, Source
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.text import ModelText
from sdcpd.roles.generation import Generations, ModelCard


class ModelTexts:
    """Looks models up and tokenizes, in a worker: about a second for a million characters."""

    def __init__(
        self, ports: FrontendPorts, generations: Generations, texts: Mapping[str, ModelText], *, max_prompt_chars: int
    ) -> None:
        self._ports: Final = ports
        self._generations: Final = generations
        self._texts: Final = texts
        self._max_prompt_chars: Final = max_prompt_chars

    def cards(self) -> tuple[ModelCard, ...]:
        """The models that clients may name: those that both the router and we know."""
        return tuple(card for card in self._generations.models() if card.name in self._texts)

    def find(self, name: str) -> tuple[ModelCard, ModelText]:
        """A model by its name. Raises ApiError 404."""
        cards = self.cards()
        for card in cards:
            if card.name == name:
                return card, self._texts[name]
        raise model_not_found(name, tuple(card.name for card in cards))

    async def tokenize(
        self, text: ModelText, source: Source, param: str, *, add_special_tokens: bool = True, answers: bool = True
    ) -> tuple[int, ...]:
        """Tokens of a prompt, as generations get them. Raises ApiError that names `param`, the field it came in.

        `add_special_tokens` is of bare texts, `answers` of conversations: whether the prompt ends where the assistant
        begins.
        """
        if isinstance(source, tuple):
            return source
        run = self._ports.workers.run
        if isinstance(source, str):
            self._check_length(len(source), param)
            return await run(text.encode, source, add_special_tokens)
        self._check_length(sum(len(message.content) for message in source.messages), param)
        check_conversation(text, source)
        try:
            return await run(text.encode_chat, source.messages, source.variables, self._ports.wall_clock(), answers)
        except ChatRefused as refusal:
            raise invalid("messages", str(refusal)) from refusal

    def _check_length(self, chars: int, param: str) -> None:
        if chars > self._max_prompt_chars:
            raise invalid(
                param,
                f"{param}: {chars} characters are more than the {self._max_prompt_chars} accepted here",
                "string_above_max_length",
            )


def check_conversation(text: ModelText, source: Conversation) -> None:
    """Raises ApiError where the model has no template, or the caller sets what is the server's."""
    if text.template is None:
        raise invalid(
            "messages",
            "this model has no chat template; use /v1/completions with a prompt, or add chat_template.jinja to "
            "the model's folder",
        )
    for name in source.variables:
        if text.template.reserves(name):
            param = f"chat_template_kwargs.{name}"
            raise invalid(param, f"{param}: this template variable is set by the server")
