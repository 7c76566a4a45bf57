"""A model's text side: its tokenizer, chat template and stop tokens, read from a Hugging Face folder.

Theory: three files may name tokens that end a turn (config.json, generation_config.json, tokenizer_config.json), each
one or several, and they disagree in the field; all of them count. A chat template writes its own beginning-of-text
token, so rendered text is tokenized without the tokenizer's additions; a bare prompt is tokenized with them. The
tokenizer's own truncation and padding are switched off: a prompt that does not fit is refused, never cut.

Everything here blocks. Tokenizing takes about a second for a million characters; the batch call of the library is used
for a single text because it lets other threads run meanwhile, which the plain call does not.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from sdcpd.frontend.chat_template import ChatMessage, ChatTemplate, TemplateUnusable
from sdcpd.frontend.detokenizer import Detokenizer, TokenReader, UnknownDecoder

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
        self.name: Final = name
        self.stop: Final = stop
        """Ids that end an answer unless the caller ignores them, rising."""
        self.template: Final = template
        self._tokenizer: Final = tokenizer
        self._reader: Final = TokenReader(tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """A bare prompt, with the tokens that the tokenizer puts around a text. Blocks."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, object], wall_clock_s: float
    ) -> tuple[int, ...]:
        """Messages through the template. Blocks. Raises ChatRefused. The template must exist."""
        assert self.template is not None, "the caller asks for a template first"
        text = self.template.render(messages, variables, wall_clock_s)
        return self._encode(text, add_special_tokens=False)

    def detokenizer(self, *, after: Sequence[int] = ()) -> Detokenizer:
        """For one answer; `after` as in TokenReader.detokenizer."""
        return self._reader.detokenizer(after=after)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)


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
