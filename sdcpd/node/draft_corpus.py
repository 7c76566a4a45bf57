"""An operator's corpus for suffix decoding: texts that answers are likely to repeat (`drafter.suffix.corpus`).

A file of JSON lines; each line is one text, as a string or as an array of tokens. Strings are encoded by the target's
tokenizer, without the special tokens that a prompt begins with.
"""

from pathlib import Path

import msgspec

from sdcpd.drafting.settings import SuffixSettings
from sdcpd.engine.model_config import ModelRefused, read_model_config
from sdcpd.frontend.text import load_model_text

Line = str | list[int]


def read_corpus(settings: SuffixSettings, target: Path) -> list[tuple[int, ...]]:
    """The corpus as tokens, in the order of the file. `target` is a folder with the target's tokenizer. Blocks.

    Raises ModelRefused for a file that cannot be read or understood, a token outside the target's vocabulary, or more
    tokens than `max_corpus_tokens`.
    """
    assert settings.corpus is not None
    path = Path(settings.corpus)
    text = load_model_text(target.name, target)
    vocabulary = read_model_config(target).vocabulary
    texts: list[tuple[int, ...]] = []
    total = 0
    try:
        with path.open("rb") as lines:
            for number, octets in enumerate(lines, 1):
                if not octets.strip():
                    continue
                where = f"drafter.suffix.corpus: {path}, line {number}"
                try:
                    line = msgspec.json.decode(octets, type=Line)
                except msgspec.DecodeError as error:
                    raise ModelRefused(f"{where}: {error}. Each line is a string or an array of tokens.") from error
                tokens = text.encode(line) if isinstance(line, str) else tuple(line)
                if not all(0 <= token < vocabulary for token in tokens):
                    raise ModelRefused(f"{where}: a token is outside the target's vocabulary of {vocabulary}.")
                total += len(tokens)
                if total > settings.max_corpus_tokens:
                    raise ModelRefused(
                        f"{where}: the corpus has more than max_corpus_tokens = {settings.max_corpus_tokens} tokens. "
                        "Shorten it or raise the limit; each takes up to 0.35 KiB of memory."
                    )
                texts.append(tokens)
    except OSError as error:
        raise ModelRefused(f"drafter.suffix.corpus: {path} cannot be read ({error.strerror}).") from error
    return texts
