"""The router's copy of the output (draft 4.2, 6.7). Faults of pages: tests/protocol/test_placement.py as well."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from sdcpd.protocol.logprobs import pack_entry
from sdcpd.protocol.messages import Output
from sdcpd.protocol.output_copy import OutputCopy, PageFault
from sdcpd.protocol.terms import Action
from tests.support.messages import SESSION, contract
from tests.support.verifying import PROMPT, chain

CONTRACT = contract(max_new=8)


def page(from_: int, *tokens: int, **members: Any) -> Output:
    values: dict[str, Any] = {"session": SESSION, "epoch": 1, "from_": from_, "tokens": tokens, "final": False}
    return Output(**(values | members))


def filled() -> OutputCopy:
    copy = OutputCopy(SESSION, 1, CONTRACT, PROMPT)
    assert copy.take(page(0, 5, 6), 100) is None
    return copy


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (page(2, 7), None),
        (page(1, 6, 7), None),
        (page(0), None),
        (page(3, 7), PageFault.GAP),
        (page(0, 5, 9), PageFault.CHANGED),
        (page(2, 7, epoch=0), PageFault.OLD_EPOCH),
        (page(2, 7, epoch=2), PageFault.NEW_EPOCH),
        (page(2, 7, session=bytes(16)), PageFault.OTHER_SESSION),
        (page(2, 1, 2, 3, 4, 5, 6, 7), PageFault.TOO_LONG),
        (page(2, 100), PageFault.OUTSIDE_VOCABULARY),
        (page(0, 5, final=True, finish=Action.FINISH), PageFault.CHANGED),
    ],
)
def test_pages(read: Output, fault: PageFault | None) -> None:
    copy = filled()
    assert copy.take(read, 100) is fault
    assert copy.digest == chain(CONTRACT, PROMPT, copy.tokens(0))[-1]


def test_nothing_follows_the_final_page() -> None:
    copy = filled()
    last = page(2, 7, final=True, finish=Action.FINISH)
    assert copy.take(last, 100) is None
    assert copy.take(last, 100) is None, "a repeat adds nothing"
    assert copy.take(page(3, 8), 100) is PageFault.CHANGED
    assert (copy.tokens(0), copy.final) == ((5, 6, 7), last)


def entry(token: int) -> bytes:
    return pack_entry([(token, -1.0), (3, -0.5)])


def test_what_came_from_a_log_is_complete_once_its_entries_are_told() -> None:
    """Decision 114: after a failover pages are read from the first token without an entry on."""
    copy = OutputCopy(SESSION, 1, CONTRACT, PROMPT, logprobs=1)
    assert copy.take(page(0, 5, 6, logprobs=(entry(5), entry(6))), 100) is None
    assert copy.resume((5, 6, 7, 8)) is None
    assert (len(copy), copy.complete) == (4, 2)
    copy.move(2)
    assert copy.take(page(3, 8, epoch=2, logprobs=(entry(8),)), 100) is PageFault.GAP
    assert copy.take(page(1, 6, 7, epoch=2, logprobs=(entry(6), entry(7))), 100) is None
    assert (len(copy), copy.complete) == (4, 3)
    assert copy.take(page(3, 8, 9, epoch=2, logprobs=(entry(8), entry(9))), 100) is None
    assert copy.entries(0, 5) == tuple(map(entry, (5, 6, 7, 8, 9)))
    assert copy.digest == chain(CONTRACT, PROMPT, (5, 6, 7, 8, 9))[-1]


@pytest.mark.parametrize("entries", [(), (entry(5),), (entry(5), entry(5)), (entry(5), entry(6) + bytes(8))])
def test_entries_of_other_tokens_are_a_breach(entries: tuple[bytes, ...]) -> None:
    copy = OutputCopy(SESSION, 1, CONTRACT, PROMPT, logprobs=1)
    assert copy.take(page(0, 5, 6, logprobs=entries), 100) is PageFault.LOGPROBS
    assert PageFault.LOGPROBS.breach


def test_a_verifier_that_knows_no_logprobs_tells_none() -> None:
    copy = OutputCopy(SESSION, 1, CONTRACT, PROMPT, logprobs=1)
    assert copy.take(page(0, 5, 6), 100) is None
    assert (copy.complete, copy.entries(0, 2)) == (2, (b"", b""))
    assert filled().entries(0, 2) is UNSET, "nobody asked"


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=4), st.booleans()), max_size=12))
def test_any_pages_leave_a_prefix_with_its_digest(pages: list[tuple[int, list[int], bool]]) -> None:
    copy = OutputCopy(SESSION, 1, CONTRACT, PROMPT)
    for from_, tokens, final in pages:
        before = copy.tokens(0)
        fault = copy.take(page(from_, *tokens, final=final), 8)
        assert copy.tokens(0)[: len(before)] == before
        assert fault is None or copy.tokens(0) == before
        assert copy.digest == copy.digest_at(len(copy)) == chain(CONTRACT, PROMPT, copy.tokens(0))[-1]
