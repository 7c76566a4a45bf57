"""POST /tokenize and /detokenize, in the shapes known from vLLM.

    {"model", "prompt", "add_special_tokens": true, "return_token_strs": false}
    {"model", "messages", "add_generation_prompt": true, "chat_template_kwargs": {}, "return_token_strs": false}
        -> {"count", "max_model_len", "tokens", "token_strs"}
    {"model", "tokens"} -> {"prompt"}

`model` may be left out where there is one only. The tokens are exactly those that a completion of the same prompt or
messages begins with, and nothing is generated, so this answers also while no verifier is there.
"""

from typing import Final

import msgspec
from msgspec import Struct

from sdcpd.frontend.errors import invalid
from sdcpd.frontend.fields import MESSAGE_TOKENS, TEXT_TOKENS, read_fields
from sdcpd.frontend.messages import read_messages
from sdcpd.frontend.model_texts import ModelTexts
from sdcpd.frontend.openai import Conversation, Source, read_object, read_tokens
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.text import ModelText
from sdcpd.roles.generation import ModelCard


class _TextRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class _MessagesRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    messages: list[dict[str, object]]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class _TokensRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[object]


class _Tokens(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: tuple[int, ...]
    token_strs: tuple[str | None, ...] | None = None


class _Text(Struct, frozen=True):
    prompt: str


class Tokenizing:
    """Serves both. Bodies in, bodies out; raises ApiError."""

    def __init__(self, ports: FrontendPorts, texts: ModelTexts) -> None:
        self._ports: Final = ports
        self._texts: Final = texts

    async def tokenize(self, body: bytes) -> bytes:
        """POST /tokenize."""
        values = read_object(body)
        add_special_tokens = answers = True
        source: Source
        if "messages" in values:
            chat = read_fields(values, _MessagesRequest, MESSAGE_TOKENS)
            source = Conversation(read_messages(chat.messages), chat.chat_template_kwargs or {})
            answers = chat.add_generation_prompt is not False
            model, strings = chat.model, chat.return_token_strs
        else:
            plain = read_fields(values, _TextRequest, TEXT_TOKENS)
            source, add_special_tokens = plain.prompt, plain.add_special_tokens is not False
            model, strings = plain.model, plain.return_token_strs
        card, text = self._find(model)
        param = "messages" if isinstance(source, Conversation) else "prompt"
        tokens = await self._texts.tokenize(text, source, param, add_special_tokens=add_special_tokens, answers=answers)
        return msgspec.json.encode(
            _Tokens(
                count=len(tokens),
                max_model_len=card.context_tokens or None,
                tokens=tokens,
                token_strs=tuple(map(text.spelling, tokens)) if strings else None,
            )
        )

    async def detokenize(self, body: bytes) -> bytes:
        """POST /detokenize."""
        request = read_fields(read_object(body), _TokensRequest, {})
        card, text = self._find(request.model)
        tokens = read_tokens("tokens", request.tokens)
        size = max(card.vocabulary, text.vocabulary)
        if tokens and max(tokens) >= size:
            raise invalid("tokens", f"tokens: a token id is outside the model's vocabulary of {size}")
        return msgspec.json.encode(_Text(await self._ports.workers.run(text.decode, tokens)))

    def _find(self, name: str | None) -> tuple[ModelCard, ModelText]:
        if name is None:
            cards = self._texts.cards()
            if len(cards) != 1:
                raise invalid("model", "model: there are several; name one")
            name = cards[0].name
        return self._texts.find(name)
