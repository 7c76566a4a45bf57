"""One answer: what becomes text, what is counted, how it ends (bugs 14, 15, 16)."""

import random
from collections.abc import Sequence

import pytest

from sdcpd.frontend.reply import Finish, Reply
from sdcpd.frontend.stops import StopScanner
from sdcpd.protocol.messages import Output
from sdcpd.protocol.terms import Action
from tests.support.frontend import EOS, STATS, model_text, page, tokens_of

WORDS = ("ab ", "x STO", "P yz", "DEF", "G", "HI", "J", "HX")
AB, X_STO, P_YZ, DEF, G, HI, J, HX = range(258, 266)
TEXT = model_text(words=WORDS)


def reply_of(
    pages: Sequence[Output], *, stops: tuple[str, ...] = (), stop_tokens: Sequence[int] = (EOS,)
) -> tuple[Reply, list[str]]:
    reply = Reply(TEXT.detokenizer(), StopScanner(stops), frozenset(stop_tokens))
    texts = []
    for one in pages:
        texts.append(reply.take(one).text)
        if reply.settled:
            break
    return reply, texts


def test_a_stop_string_in_the_middle_of_a_block() -> None:
    reply, texts = reply_of([page([AB, X_STO, P_YZ, AB, AB])], stops=("STOP",))
    assert texts == ["ab x "]
    assert (reply.finish, reply.completion_tokens, reply.settled) == ("stop", 3, True)
    assert reply.stats is None  # the session goes on until it is cancelled: there is no account of it yet


@pytest.mark.parametrize("pages", [[[DEF, G, HI, J]], [[DEF], [G], [HI], [J]], [[DEF, G], [HI, J]]])
def test_a_stop_string_of_several_tokens_shows_nothing(pages: list[list[int]]) -> None:
    reply, texts = reply_of([page(tokens) for tokens in pages], stops=("DEFGHIJ",))
    assert "".join(texts) == ""
    assert (reply.finish, reply.completion_tokens) == ("stop", 4)


def test_what_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    reply, texts = reply_of([page([DEF]), page([G, HX]), page([DEF], final=True)], stops=("DEFGHIJ",))
    assert texts == ["", "DEFGHX", "DEF"]
    assert (reply.finish, reply.stats) == ("length", STATS)


def test_text_let_go_at_the_end_may_complete_a_stop_string() -> None:
    """An unfinished character becomes U+FFFD only at the end."""
    reply, texts = reply_of([page([*tokens_of("a"), 0xF0 + 2], final=True)], stops=("\ufffd",))
    assert (texts, reply.finish) == (["a"], "stop")


@pytest.mark.parametrize(
    ("pages", "text", "finish", "count"),
    [
        ([page([*tokens_of("hi"), EOS], final=True)], "hi", "stop", 3),
        ([page([*tokens_of("hi"), EOS]), page([], final=True)], "hi", "stop", 3),
        ([page(tokens_of("hi")), page([EOS], final=True)], "hi", "stop", 3),
        ([page(tokens_of("hi"), final=True)], "hi", "length", 2),
        ([page([], final=True)], "", "length", 0),
        ([page(tokens_of("hi"), final=True, finish=Action.FAIL, reason="cancelled")], "hi", "error", 2),
    ],
)
def test_endings(pages: list[Output], text: str, finish: Finish, count: int) -> None:
    reply, texts = reply_of(pages)
    assert ("".join(texts), reply.finish, reply.completion_tokens) == (text, finish, count)
    assert reply.settled
    assert reply.reason == ("cancelled" if finish == "error" else None)
    assert (reply.stats == STATS) == (finish != "error")


def test_after_a_stop_token_the_final_page_is_awaited_for_its_account() -> None:
    reply, _ = reply_of([page([EOS])])
    assert (reply.finish, reply.settled) == ("stop", False)


def test_any_of_several_stop_tokens_ends_without_its_text() -> None:
    (exclamation,) = tokens_of("!")
    reply, texts = reply_of([page(tokens_of("hi!"), final=True)], stop_tokens=(EOS, exclamation))
    assert (texts, reply.finish, reply.completion_tokens) == (["hi"], "stop", 3)


def test_a_stop_token_that_is_ignored_has_no_text_if_it_is_special() -> None:
    reply, texts = reply_of([page([*tokens_of("a"), EOS, *tokens_of("b")], final=True)], stop_tokens=())
    assert (texts, reply.finish, reply.completion_tokens) == (["ab"], "length", 3)


def test_borders_of_pages_change_nothing() -> None:
    draw = random.Random(4)
    for _ in range(300):
        tokens = [draw.randrange(2, 258) if draw.random() < 0.3 else draw.choice(tokens_of("ab🌍é")) for _ in range(12)]
        cuts = sorted(draw.choices(range(13), k=draw.randrange(5)))
        blocks = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, 12], strict=True)]
        pages = [page(block) for block in blocks if block] + [page([], final=True)]
        _, texts = reply_of(pages)
        whole = TEXT.detokenizer()
        assert "".join(texts) == "".join([*(whole.push(token) for token in tokens), whole.finish()])
        stopped, cut = reply_of(pages, stops=("ab", "a"))
        assert (stopped.completion_tokens, "".join(cut), stopped.finish) == _one_by_one(tokens)


def _one_by_one(tokens: list[int]) -> tuple[int, str, str | None]:
    reply, texts = reply_of([page([token]) for token in tokens] + [page([], final=True)], stops=("ab", "a"))
    return reply.completion_tokens, "".join(texts), reply.finish
