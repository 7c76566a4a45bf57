"""Log-probabilities in both shapes: one entry a counted token, whatever is cut, split over pages or not whole text."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from sdcpd.frontend.logprobs import LEAST
from sdcpd.protocol.logprobs import pack_entry
from sdcpd.protocol.messages import Output
from tests.support.frontend import EOS, make_world, metaspace_tokenizer, page, tokens_of


def told(tokens: Sequence[int], *, final: bool = False, values: bool = True) -> Output:
    """A page with entries: each token at -0.5, beside it the next id at -1.5 and one of no probability."""
    entries = tuple(
        pack_entry([(token, -0.5), (token, -0.5), (token + 1, -1.5), (0, float("-inf"))]) if values else b""
        for token in tokens
    )
    return msgspec.structs.replace(page(tokens, final=final), logprobs=entries)


SCRIPT = [told(tokens_of("h")), told([*tokens_of("é!"), EOS], final=True)]


async def test_a_chat() -> None:
    world = make_world(SCRIPT)
    answer = await world.chat(logprobs=True, top_logprobs=3)
    (request,) = world.generations.requests
    assert request.logprobs == 3
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert len(content) == answer.json["usage"]["completion_tokens"] == 5
    assert content[0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "i", "logprob": -1.5, "bytes": [105]},
            {"token": "<s>", "logprob": LEAST, "bytes": list(b"<s>")},
        ],
    }
    assert [entry["bytes"] for entry in content[1:]] == [[0xC3], [0xA9], [33], list(b"</s>")]
    assert [entry["token"] for entry in content[1:3]] == ["\ufffd", "\ufffd"]


async def test_a_text() -> None:
    answer = await make_world(SCRIPT).complete(logprobs=3)
    logprobs = answer.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd", "!", "</s>"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5, "<s>": LEAST}


@pytest.mark.parametrize("chat", [False, True])
async def test_streamed_ones_join_to_the_whole(chat: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    world = make_world(SCRIPT)
    whole = (await (world.chat(**options) if chat else world.complete(**options))).json["choices"][0]["logprobs"]
    events = (await (world.chat(stream=True, **options) if chat else world.complete(stream=True, **options))).events
    pieces = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
    assert len(pieces) == 2
    for name, value in whole.items():
        if value is not None:
            assert [item for piece in pieces for item in piece[name]] == value


async def test_tokens_behind_a_stop_string_are_not_told() -> None:
    answer = await make_world([told(tokens_of("abcde"))]).complete(logprobs=0, stop="bc")
    assert answer.json["choices"][0]["text"] == "a"
    assert answer.json["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer.json["usage"]["completion_tokens"] == 3


async def test_values_that_are_not_to_be_had_are_null() -> None:
    world = make_world([told(tokens_of("a"), values=False, final=True)])
    (entry,) = (await world.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"]) == ("a", None, [])
    text = (await world.complete(logprobs=2)).json["choices"][0]["logprobs"]
    assert (text["token_logprobs"], text["top_logprobs"]) == ([None], None)


async def test_nothing_is_told_that_was_not_asked_for() -> None:
    world = make_world([page(tokens_of("a"), final=True)])
    assert (await world.chat(logprobs=False)).json["choices"][0]["logprobs"] is None
    assert world.generations.requests[0].logprobs is None


def test_octets_of_sentencepiece_tokens() -> None:
    from sdcpd.frontend.detokenizer import TokenReader

    tokenizer = metaspace_tokenizer()
    reader, vocabulary = TokenReader(tokenizer), tokenizer.get_vocab()
    assert reader.octets(vocabulary["▁Hello"]) == b" Hello"
    assert reader.octets(vocabulary["<0xF0>"]) == b"\xf0"
    assert reader.octets(vocabulary["</s>"]) == b"</s>"
    assert reader.octets(10**6) == b""
