"""Tokens to text, one token at a time, so that the pieces join to what decoding all tokens at once gives.

Theory: a piece of text may be shown when no later token can change it. What a later token can change depends on the
tokenizer's decoder, of which two families are in use.

*Bytes* (decoder `ByteLevel`): the text is the UTF-8 reading of all tokens' octets in a row. An incremental UTF-8 reader
keeps an unfinished character back and gives U+FFFD for octets that can never become one, by the same rule (one for each
maximal ill-formed part) as the whole decoding.

*Windows* (all others): a token's text depends on the token before it (is this the first? a continuation?) and, if the
vocabulary falls back to bytes, on the whole run of byte tokens it stands in: such a run is a text only if all of it is
UTF-8, so it is held until it ends. A token's text is what decoding [previous token, run, token] has beyond decoding
[previous token]. Each token is decoded twice at most, whatever the length of the answer.

Special tokens have no text; they do not end a run of bytes either, since decoding drops them first.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Final, Protocol

from tokenizers import Tokenizer

BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")

PER_TOKEN_STEPS: Final = frozenset({"ByteFallback", "Replace", "Metaspace"})
"""Decoder steps that look at no more than a token, its neighbours and runs of byte tokens, as long as they stand
before `Fuse`, which joins all tokens into one."""


class UnknownDecoder(ValueError):
    """The tokenizer's decoder is of a kind whose text could change in hindsight in ways not known here."""


class Detokenizer(Protocol):
    """The text of one answer in the making."""

    def push(self, token: int) -> str:
        """Take the next token; the text that is certain now, often that token's own."""
        ...

    def finish(self) -> str:
        """The text still held back, once there are no more tokens. To be called once, last."""
        ...


class TokenReader:
    """What a model's tokenizer says of single tokens. Shared by all answers of the model; holds no state of any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UnknownDecoder."""
        self.tokenizer: Final = tokenizer
        self.is_bytes: Final = decodes_bytes(tokenizer)
        self._special: Final = frozenset(
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        )

    def text_token(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None for special tokens and ids that the vocabulary lacks."""
        spelled = self.tokenizer.id_to_token(token)
        return None if spelled is None or spelled in self._special else spelled

    def octets(self, token: int) -> bytes:
        """What a token contributes to a text, as octets: not always whole characters. Special ones as spelled."""
        spelled = self.tokenizer.id_to_token(token)
        if spelled is None or spelled in self._special:
            return b"" if spelled is None else spelled.encode()
        if self.is_bytes:
            return _octets(spelled)
        if BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(spelled[3:5], 16)])
        return str(spelled).replace("▁", " ").encode()

    def detokenizer(self, *, after: Sequence[int] = ()) -> Detokenizer:
        """A fresh one. `after`: tokens that the text continues, so that a space between them and it is not lost."""
        if self.is_bytes:
            return ByteDetokenizer(self)
        return WindowDetokenizer(self, after)


class ByteDetokenizer:
    """For decoder `ByteLevel`."""

    def __init__(self, reader: TokenReader) -> None:
        self._reader: Final = reader
        self._utf8: Final = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        spelled = self._reader.text_token(token)
        return "" if spelled is None else self._utf8.decode(_octets(spelled))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDetokenizer:
    """For decoders that work token by token."""

    def __init__(self, reader: TokenReader, after: Sequence[int] = ()) -> None:
        self._reader: Final = reader
        self._run: list[int] = []  # byte tokens since the anchor
        self._anchor: list[int] = []  # the last token of text before the run, or nothing at the start
        for token in reversed(after):
            spelled = reader.text_token(token)
            if spelled is not None:
                if not BYTE_TOKEN.fullmatch(spelled):
                    self._anchor = [token]
                break

    def push(self, token: int) -> str:
        spelled = self._reader.text_token(token)
        if spelled is None:
            return ""
        if BYTE_TOKEN.fullmatch(spelled):
            self._run.append(token)
            return ""
        text = self._beyond_anchor([*self._run, token])
        self._run = []
        self._anchor = [token]
        return text

    def finish(self) -> str:
        return self._beyond_anchor(self._run) if self._run else ""

    def _beyond_anchor(self, tokens: list[int]) -> str:
        before = self._reader.tokenizer.decode(self._anchor) if self._anchor else ""
        whole = self._reader.tokenizer.decode([*self._anchor, *tokens])
        assert whole.startswith(before), "the decoder changed the text of an earlier token"
        return whole[len(before) :]


def decodes_bytes(tokenizer: Tokenizer) -> bool:
    """Whether the decoder is of the byte family. Raises UnknownDecoder if it is of neither."""
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        if [kind for kind in kinds if kind != "Fuse"] != ["ByteLevel"]:
            raise UnknownDecoder(f"decoder {kinds}: ByteLevel is known only by itself")
        return True
    fused = False
    for step in steps:
        kind = step["type"]
        strips_start_only = kind == "Strip" and step.get("stop", 0) == 0
        known = strips_start_only if fused else kind in PER_TOKEN_STEPS or kind in ("Fuse", "Strip")
        if not known:
            raise UnknownDecoder(f"decoder {kinds}: the step {kind} cannot be taken token by token")
        fused = fused or kind == "Fuse"
    return False


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies spell each octet as one printable character: printable Latin-1 characters stand for
    themselves, and the rest, in order, for the characters from U+0100 on."""
    alphabet: dict[str, int] = {}
    shifted = 0
    for octet in range(256):
        if 0x21 <= octet <= 0x7E or 0xA1 <= octet <= 0xAC or 0xAE <= octet <= 0xFF:
            alphabet[chr(octet)] = octet
        else:
            alphabet[chr(0x100 + shifted)] = octet
            shifted += 1
    return alphabet


_OCTET_OF: Final = _byte_alphabet()


def _octets(spelled: str) -> bytes:
    """The octets of a token of a byte-level vocabulary; an added token that is not so spelled is plain UTF-8."""
    try:
        return bytes([_OCTET_OF[character] for character in spelled])
    except KeyError:
        return spelled.encode()
