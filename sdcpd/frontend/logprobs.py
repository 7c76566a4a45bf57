"""Log-probabilities of an answer's tokens, in the two shapes of the OpenAI API.

One entry for each token that `usage` counts, that which ended the answer included. The values are the target's own,
before temperature, top-k and top-p (decision 114). A token is shown as text, and where the API has it as octets, since
a token need not be whole characters. A value that is not to be had (its token was read from a commit log) is null.
"""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from sdcpd.protocol.logprobs import unpack_entry

LEAST: Final = -9999.0
"""What the API writes for a probability of zero: JSON has no infinity."""


class TokenLogprobs(Struct, frozen=True):
    """One token. `top`: the most probable at its place, falling. `offset`: characters of the answer before it."""

    octets: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


class _Top(Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class _Content(Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: tuple[int, ...]
    top_logprobs: tuple[_Top, ...]


class ChatLogprobs(Struct, frozen=True):
    """`logprobs` of a chat's choice."""

    content: tuple[_Content, ...]
    refusal: None = None


class TextLogprobs(Struct, frozen=True):
    """`logprobs` of a text's choice."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float], ...] | None
    text_offset: tuple[int, ...]


def read_entry(entry: bytes, token: int, offset: int, octets: Callable[[int], bytes]) -> TokenLogprobs:
    """An entry of an output page (protocol/logprobs.py) for its token. `octets`: those of any token."""
    pairs = unpack_entry(entry)
    if not pairs:
        return TokenLogprobs(octets(token), None, (), offset)
    (_, own), *top = pairs
    return TokenLogprobs(
        octets(token), _finite(own), tuple((octets(one), _finite(value)) for one, value in top), offset
    )


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    """None where there are none to tell."""
    if not tokens:
        return None
    return ChatLogprobs(
        tuple(
            _Content(
                _text(token.octets),
                token.logprob,
                tuple(token.octets),
                tuple(_Top(_text(octets), value, tuple(octets)) for octets, value in token.top),
            )
            for token in tokens
        )
    )


def text_logprobs(tokens: Sequence[TokenLogprobs]) -> TextLogprobs | None:
    """None where there are none to tell. The alternatives of a token are by their text, itself among them, as the API
    has it; of several with the same text (halves of characters) the most probable."""
    if not tokens:
        return None
    asked = any(token.top for token in tokens)
    return TextLogprobs(
        tuple(_text(token.octets) for token in tokens),
        tuple(token.logprob for token in tokens),
        tuple(map(_by_text, tokens)) if asked else None,
        tuple(token.offset for token in tokens),
    )


def _by_text(token: TokenLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for octets, value in token.top:
        found.setdefault(_text(octets), value)
    if token.logprob is not None:
        found.setdefault(_text(token.octets), token.logprob)
    return found


def _text(octets: bytes) -> str:
    return octets.decode(errors="replace")


def _finite(value: float) -> float:
    return max(value, LEAST)
