"""Entries of log-probabilities, and where they stand beside the output (decision 114)."""

import math

import cbor2
import pytest

from sdcpd.protocol import encoding
from sdcpd.protocol.logprobs import are_entries, entries_of, pack_entry, unpack_entry
from sdcpd.protocol.messages import Output, SessionOpen
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Begin, SessionLimits
from tests.support.messages import DRAFTER, SESSION, VERIFIER, assignment, contract, proposal, session_open

SEVEN = pack_entry([(7, -0.5), (7, -0.5), (9, -1.5)])


def test_an_entry_is_pairs_of_id_and_binary32() -> None:
    assert len(SEVEN) == 24
    assert SEVEN[:8] == b"\x07\x00\x00\x00\x00\x00\x00\xbf"
    assert unpack_entry(SEVEN) == ((7, -0.5), (7, -0.5), (9, -1.5))
    assert unpack_entry(b"") == ()
    assert unpack_entry(pack_entry([((1 << 32) - 1, -math.inf)])) == (((1 << 32) - 1, -math.inf),)


@pytest.mark.parametrize(
    ("entries", "tokens", "fits"),
    [
        ((SEVEN,), (7,), True),
        ((b"",), (7,), True),
        ((), (), True),
        ((SEVEN,), (8,), False),
        ((SEVEN,), (7, 7), False),
        ((SEVEN[:-1],), (7,), False),
        ((SEVEN + SEVEN[:8],), (7,), False),
    ],
)
def test_what_may_stand_beside_tokens(entries: tuple[bytes, ...], tokens: tuple[int, ...], fits: bool) -> None:
    assert are_entries(entries, tokens, alternatives=2) is fits


def test_what_is_not_known_is_empty() -> None:
    assert entries_of([b"a", b"b"], 1, 3) == (b"b", b"", b"")
    assert entries_of([b"a"], 0, 1) == (b"a",)


def test_on_the_wire() -> None:
    page = Output(session=SESSION, epoch=1, from_=0, tokens=(7, 8), final=False, logprobs=(SEVEN, b""))
    octets = encoding.encode(page)
    assert cbor2.loads(octets)["sdcpd_logprobs"] == [SEVEN, b""]
    assert encoding.decode(octets, Output) == page
    assert encoding.decode(encoding.encode(session_open(logprobs=20)), SessionOpen).logprobs == 20
    for bad in (21, -1, True):
        item = cbor2.loads(encoding.encode(session_open())) | {"sdcpd_logprobs": bad}
        with pytest.raises(IllFormed, match="sdcpd_logprobs"):
            encoding.decode(cbor2.dumps(item), SessionOpen)
    too_long = cbor2.loads(octets) | {"sdcpd_logprobs": [bytes(169)]}
    with pytest.raises(IllFormed, match="sdcpd_logprobs"):
        encoding.decode(cbor2.dumps(too_long), Output)


def asked(logprobs: int | None, **of: int) -> Session:
    members = {} if logprobs is None else {"logprobs": logprobs}
    session = Session(
        session_open(contract=contract(**of), **members),
        instance=VERIFIER,
        prompt=(1, 1, 1),
        vocabulary=100,
        limits=SessionLimits(output_page_tokens=2),
        log_tag='"t0"',
        now=0.0,
    )
    session.assign(assignment(contract=session.contract, seq=1), now=0.0)
    return session


def play(session: Session, proposed: tuple[int, ...], best: tuple[int, ...]) -> None:
    at = session.prefix.at
    sent = proposal(proposed, round=at.round + 1, base=at.committed, base_digest=at.digest)
    begun = session.propose(DRAFTER, sent, 0.0)
    assert isinstance(begun, Begin)
    entries = [] if session.logprobs is None else [pack_entry([(token, -token / 8)]) for token in best]
    assert session.scored(begun.work.ticket, best, load=0, logprobs=entries)
    page = session.output(at.committed)
    assert page is None, "not before the record is durable"
    session.appended(f'"t{at.round + 1}"', 0.0)


def values(page: Output | None) -> list[tuple[int, float]]:
    assert page is not None
    assert isinstance(page.logprobs, tuple)
    return [unpack_entry(entry)[0] for entry in page.logprobs]


def test_entries_stand_beside_the_tokens_page_by_page() -> None:
    """Of verified, corrected and additional tokens alike; those of rejected positions go, and those behind the cut."""
    session = asked(0, max_new=5)
    play(session, (10, 11, 12), (10, 21, 12, 13))
    play(session, (30, 31, 32), (30, 31, 32, 33))
    assert values(session.output(0)) == [(10, -10 / 8), (21, -21 / 8)]
    assert values(session.output(1)) == [(21, -21 / 8), (30, -30 / 8)]
    last = session.output(3)
    assert values(last) == [(31, -31 / 8), (32, -32 / 8)]
    assert last is not None
    assert (last.final, last.tokens) == (True, (31, 32))
    assert values(session.output(5)) == []


def test_who_does_not_ask_gets_none() -> None:
    session = asked(None)
    play(session, (10,), (10, 11))
    page = session.output(0)
    assert page is not None
    assert not isinstance(page.logprobs, tuple)
    assert session.prefix.logprobs == []
