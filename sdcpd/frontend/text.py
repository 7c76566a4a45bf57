"""A model's text side: its tokenizer, chat template and stop tokens, read from a Hugging Face folder.

Theory: three files may name tokens that end a turn (config.json, generation_config.json, tokenizer_config.json), each
one or several, and they disagree in the field; all of them count. A chat template writes its own beginning-of-text
token, so rendered text is tokenized without the tokenizer's additions; a bare prompt is tokenized with them. The
tokenizer's own truncation and padding are switched off: a prompt that does not fit is refused, never cut.

The spelling of a special token inside a message is text like any other: a user who writes <|im_end|> must not end his
turn. So each is replaced, before the template sees the messages, by a character that stands nowhere in them, and the
pieces between these characters are tokenized by themselves; messages without such spellings take the plain way, and
have the tokens that everybody else's tokenizer gives them. In a bare prompt, which is the caller's as a whole, special
tokens count as such. A beginning-of-text token written there is not added a second time.

Everything here blocks. Tokenizing takes about a second for a million characters; the batch call of the library is used
for a single text because it lets other threads run meanwhile, which the plain call does not.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from sdcpd.frontend.chat_template import ChatMessage, ChatTemplate, TemplateUnusable
from sdcpd.frontend.detokenizer import Detokenizer, TokenReader, UnknownDecoder

PRIVATE_USE: Final = range(0xF0000, 0xFFFFE)
"""Of Unicode, plane 15: more than a request may have characters of, times the special tokens of any model."""

SPECIAL_TOKEN_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens by the names that templates use."""


class ModelFolderUnusable(ValueError):
    """The folder's text files are missing, broken or of an unknown kind. The text says which and what to do."""


class ModelText:
    """Text to tokens and back for one model."""

    def __init__(
        self, name: str, tokenizer: Tokenizer, *, stop: tuple[int, ...], template: ChatTemplate | None = None
    ) -> None:
        """Raises UnknownDecoder. The tokenizer is ours from here on."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._specials: Final = {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._spelled: Final = _spelled(tokenizer, self._specials)
        self.name: Final = name
        self.stop: Final = stop
        """Ids that end an answer unless the caller ignores them, rising."""
        self.template: Final = template
        self._tokenizer: Final = tokenizer
        self._reader: Final = TokenReader(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A bare prompt, with the tokens that the tokenizer puts around a text unless told otherwise. Blocks."""
        tokens = self._encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and len(tokens) > 1 and tokens[0] == tokens[1] and tokens[0] in self._specials.values():
            return tokens[1:]
        return tokens

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, object],
        wall_clock_s: float,
        answers: bool = True,
    ) -> tuple[int, ...]:
        """Messages through the template, up to where the assistant's answer begins if it `answers`. Blocks. Raises
        ChatRefused. The template must exist."""
        assert self.template is not None, "the caller asks for a template first"
        found = [word for word in self._spelled if any(word in message.content for message in messages)]
        stands_for = dict(zip(found, _unused(messages, len(found)), strict=True))
        plain = [ChatMessage(message.role, _replaced(message.content, stands_for)) for message in messages]
        text = self.template.render(plain, variables, wall_clock_s, answers)
        if not stands_for:
            return self._encode(text, add_special_tokens=False)
        words = {character: self._spelled[word] for word, character in stands_for.items()}
        tokens: list[int] = []
        for piece in re.split(f"([{''.join(words)}])", text):
            tokens += words[piece] if piece in words else self._encode(piece, add_special_tokens=False)
        return tuple(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones as they are spelled. Blocks."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def spelling(self, token: int) -> str | None:
        """A token as the vocabulary spells it; None for ids that it lacks."""
        spelled: str | None = self._tokenizer.id_to_token(token)
        return spelled

    def octets(self, token: int) -> bytes:
        """See TokenReader.octets."""
        return self._reader.octets(token)

    @property
    def vocabulary(self) -> int:
        """Ids that the tokenizer knows are below this. A model's own vocabulary may be padded beyond it."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def detokenizer(self, *, after: Sequence[int] = ()) -> Detokenizer:
        """For one answer; `after` as in TokenReader.detokenizer."""
        return self._reader.detokenizer(after=after)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)


def _spelled(tokenizer: Tokenizer, specials: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """How each special token is written with ordinary ones; longer spellings first, since one may hold another."""
    tokenizer.encode_special_tokens = True  # the library's name for: as text
    try:
        return {
            word: tuple(tokenizer.encode(word, add_special_tokens=False).ids)
            for word in sorted(specials, key=len, reverse=True)
            if word
        }
    finally:
        tokenizer.encode_special_tokens = False


def _unused(messages: Sequence[ChatMessage], count: int) -> list[str]:
    """Characters for private use that stand in no message."""
    taken = set().union(*(message.content for message in messages)) if count else set()
    free = (chr(point) for point in PRIVATE_USE if chr(point) not in taken)
    return [character for character, _ in zip(free, range(count), strict=False)]


def _replaced(content: str, stands_for: Mapping[str, str]) -> str:
    for word, character in stands_for.items():
        content = content.replace(word, character)
    return content


def load_model_text(name: str, path: Path) -> ModelText:
    """Read tokenizer.json and what goes with it from a model's folder. Blocks. Raises ModelFolderUnusable."""
    tokenizer_file = path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ModelFolderUnusable(
            f"{path}: no tokenizer.json; the path of model {name!r} must be a Hugging Face folder"
        )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ModelFolderUnusable(f"{tokenizer_file}: not a readable tokenizer: {error}") from error
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json") | tokenizer_config)
    source = _template_source(path, tokenizer_config)
    try:
        return ModelText(
            name,
            tokenizer,
            stop=_stop_tokens(path, tokenizer, special_tokens.get("eos_token"), tokenizer_config),
            template=None if source is None else ChatTemplate(source, special_tokens),
        )
    except (UnknownDecoder, TemplateUnusable) as error:
        raise ModelFolderUnusable(f"{path}: {error}") from error


def _stop_tokens(
    path: Path, tokenizer: Tokenizer, eos_token: str | None, tokenizer_config: dict[str, Any]
) -> tuple[int, ...]:
    found: set[int] = set()
    for file, value in (
        ("config.json", _read_json(path / "config.json").get("eos_token_id")),
        ("generation_config.json", _read_json(path / "generation_config.json").get("eos_token_id")),
        ("tokenizer_config.json", tokenizer_config.get("eos_token_id")),
    ):
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if type(item) is not int or item < 0:
                raise ModelFolderUnusable(f"{path / file}: eos_token_id must be a token id or a list of them")
            found.add(item)
    if eos_token is not None:
        token = tokenizer.token_to_id(eos_token)
        if token is None:
            raise ModelFolderUnusable(f"{path}: eos_token {eos_token!r} is not in tokenizer.json; correct either")
        found.add(token)
    return tuple(sorted(found))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that the folder names, each written as a string or as an object with `content`."""
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else the entry of tokenizer_config.json, else None."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    value = _read_json(path / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(value, list):  # several by name; `default` is the one for plain chat
        by_name = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = by_name.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelFolderUnusable(f"{path}: chat_template must be a text, or a list with an entry named default")
    return value


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except ValueError as error:
        raise ModelFolderUnusable(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderUnusable(f"{file}: not a JSON object")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderUnusable(f"{file}: {error}") from error
