"""Incremental text: pieces join to the whole decoding, no character is split, whatever the tokenizer (bug 15)."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from sdcpd.frontend.detokenizer import BYTE_TOKEN, TokenReader, UnknownDecoder
from tests.support.frontend import byte_tokenizer, metaspace_tokenizer, tokens_of

REPLACEMENT = "\ufffd"


def pieces_of(reader: TokenReader, tokens: list[int], after: tuple[int, ...] = ()) -> list[str]:
    detokenizer = reader.detokenizer(after=after)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


def id_of(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None
    return token


def check_random_strings(tokenizer: Tokenizer, count: int = 300) -> None:
    """Any ids, some beyond the vocabulary; byte tokens, if there are any, and real text more often than by chance."""
    reader = TokenReader(tokenizer)
    size = tokenizer.get_vocab_size()
    octets = [token for text, token in tokenizer.get_vocab().items() if BYTE_TOKEN.fullmatch(text)] or [0]
    draw = random.Random(15)
    ill_formed = 0
    for _ in range(count):
        tokens: list[int] = []
        for _ in range(draw.randrange(20)):
            match draw.randrange(4):
                case 0:
                    tokens.append(draw.choice(octets))
                case 1:
                    text = "".join(chr(draw.choice([0x41, 0xE9, 0x65E5, 0x1F30D, 0x20])) for _ in range(3))
                    tokens += tokenizer.encode(text, add_special_tokens=False).ids
                case _:
                    tokens.append(draw.randrange(size + 3))
        whole = tokenizer.decode(tokens)
        assert "".join(pieces_of(reader, tokens)) == whole, tokens
        ill_formed += REPLACEMENT in whole
    assert ill_formed, "no string had octets that are no text"


@pytest.mark.model
def test_random_strings_of_the_demo_model(demo_model: Path) -> None:
    check_random_strings(Tokenizer.from_file(str(demo_model / "tokenizer.json")))


def test_random_strings_of_a_byte_level_vocabulary() -> None:
    tokenizer = byte_tokenizer(words=("日本", "the "))
    tokenizer.add_tokens(["a b", "<think>", "\u4e16"])  # added, not special: not spelled in the byte alphabet
    check_random_strings(tokenizer)


def test_random_strings_of_a_metaspace_vocabulary() -> None:
    check_random_strings(metaspace_tokenizer())


def test_random_strings_of_newer_metaspace_vocabularies() -> None:
    tokenizer = metaspace_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    check_random_strings(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    check_random_strings(tokenizer)


def test_words_without_a_decoder_are_separated() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    assert pieces_of(TokenReader(tokenizer), [0, 1, 1]) == ["one", " two", " two", ""]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), metaspace_tokenizer()], ids=["bytes", "metaspace"])
def test_a_character_comes_whole_or_not_yet(tokenizer: Tokenizer) -> None:
    reader = TokenReader(tokenizer)
    globe = [token + (2 if reader.is_bytes else 3) for token in "🌍".encode()]
    pieces = pieces_of(reader, globe)
    assert "".join(pieces) == "🌍"
    assert REPLACEMENT not in "".join(pieces[:3])


def test_octets_that_are_no_text_come_at_the_end() -> None:
    reader = TokenReader(byte_tokenizer())
    assert pieces_of(reader, [*tokens_of("ab"), 0xF0 + 2, 0x9F + 2]) == ["a", "b", "", "", REPLACEMENT]


def test_special_tokens_do_not_split_a_character() -> None:
    reader = TokenReader(byte_tokenizer())
    first, second = tokens_of("é")
    assert pieces_of(reader, [first, 0, second]) == ["", "", "é", ""]


def test_a_run_of_bytes_waits_for_its_end() -> None:
    """One octet that is no text spoils its whole run in such tokenizers, so no part of the run may be shown before."""
    tokenizer = metaspace_tokenizer()
    globe = [octet + 3 for octet in "🌍".encode()]
    a = id_of(tokenizer, "a")
    assert pieces_of(TokenReader(tokenizer), [a, *globe, a]) == ["a", "", "", "", "", "🌍a", ""]
    assert pieces_of(TokenReader(tokenizer), [a, *globe, 0xFF + 3]) == ["a", *[""] * 5, REPLACEMENT * 5]


def test_a_continuation_keeps_its_space() -> None:
    tokenizer = metaspace_tokenizer()
    hello, world = id_of(tokenizer, "▁Hello"), id_of(tokenizer, "▁world")
    reader = TokenReader(tokenizer)
    assert "".join(pieces_of(reader, [world])) == "world"
    assert "".join(pieces_of(reader, [world], after=(hello, 2))) == " world"  # </s> between them is no text
    assert "".join(pieces_of(reader, [world], after=(hello, 0xE2 + 3))) == "world"  # ends within a run: a fresh start


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(suffix="</w>"),
        decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
    ids=["ctc", "suffix", "replace-in-whole", "byte-level-and-more", "strip-the-end"],
)
def test_decoders_that_change_text_in_hindsight_are_refused(decoder: decoders.Decoder) -> None:
    tokenizer = metaspace_tokenizer()
    tokenizer.decoder = decoder
    with pytest.raises(UnknownDecoder):
        TokenReader(tokenizer)
