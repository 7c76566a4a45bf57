"""Draft 4.1, Session Contract."""

from hashlib import sha256
from typing import Any

import cbor2
import pytest

from sdcpd.protocol.digests import contract_digest
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import Assignment, Contract, ContractSampling, SessionOpen
from sdcpd.protocol.problems import BadContract
from sdcpd.protocol.terms import LadderAction
from tests.support.messages import assignment, contract, session_open

WRITTEN_OUT = bytes.fromhex(
    "a8"  # eight members; shorter keys first, then by octets
    "6472756c65" "01"  # rule: 1
    "6473746f70" "8102"  # stop: [2]
    "656d5f6d6178" "08"  # m_max: 8
    "66746172676574" "5820" + "01" * 32 + "676d61785f6e6577" "1820"  # target; max_new: 32
    "6866616c6c6261636b" "83010205"  # fallback: [reduce, switch, fail]
    "69746f6b656e697a6572" "5820" + "02" * 32 + "6a6c6f775f726f756e6473" "02"  # tokenizer; low_rounds: 2
)  # fmt: skip


def with_contract(message: SessionOpen | Assignment, members: dict[str, Any]) -> bytes:
    item = cbor2.loads(encode(message))
    item["contract"] |= members
    return cbor2.dumps(item)


def refuses(**members: Any) -> bool:
    with pytest.raises(BadContract) as caught:
        decode(with_contract(session_open(), members), SessionOpen)
    return (caught.value.status, caught.value.suffix) == (422, "sdcp-bad-contract")


def takes(**members: Any) -> Contract:
    return decode(with_contract(session_open(), members), SessionOpen).contract


def test_the_digest_is_over_the_deterministic_encoding_behind_a_domain_separator() -> None:
    """ "contract_digest = SHA-256( "SDCP-CONTRACT-1" || 0x00 || deterministic_cbor(contract) )" """
    assert encode(contract()) == WRITTEN_OUT
    assert contract_digest(contract()) == sha256(b"SDCP-CONTRACT-1\x00" + WRITTEN_OUT).digest()


def test_the_order_in_which_members_arrive_does_not_matter() -> None:
    """ "encoded with the core deterministic encoding of Section 4.2.1 of [RFC8949]" """
    members = cbor2.loads(WRITTEN_OUT)
    for order in (sorted(members), sorted(members, reverse=True)):
        read = decode(cbor2.dumps({key: members[key] for key in order}), Contract)
        assert contract_digest(read) == sha256(b"SDCP-CONTRACT-1\x00" + WRITTEN_OUT).digest()


@pytest.mark.parametrize("message", [session_open(), assignment()])
def test_a_key_that_is_not_defined_is_refused(message: SessionOpen | Assignment) -> None:
    """ "A contract that contains a key not defined by this document MUST be rejected with problem type
    "sdcp-bad-contract"" """
    for members in ({"m_min": 1}, {"sampling": {"min_p": 1}}):
        with pytest.raises(BadContract) as caught:
            decode(with_contract(message, members), type(message))
        assert (caught.value.status, caught.value.suffix) == (422, "sdcp-bad-contract")


def test_m_max() -> None:
    """ "m_max: uint .le 64, ; upper bound on M" """
    assert takes(m_max=64).m_max == 64
    assert refuses(m_max=65)


def test_the_permitted_drafters() -> None:
    """ "? drafters: [+ hash32], ; permitted draft models" """
    assert takes(drafters=[bytes(32)]).drafters == (bytes(32),)
    assert refuses(drafters=[])
    assert refuses(drafters=[bytes(31)])


def test_low_rounds() -> None:
    """ "low_rounds: uint .ge 1, ; R, escalation period" """
    assert refuses(low_rounds=0)


@pytest.mark.parametrize("member", ["low_ratio", "self_load"])
def test_percents(member: str) -> None:
    """ "? low_ratio: uint .le 100, ; percent, default 0" and "? self_load: uint .le 100" """
    assert getattr(takes(**{member: 100}), member) == 100
    assert refuses(**{member: 101})


def test_the_ladder_holds_four_actions() -> None:
    """ "ladder = a-reduce / a-switch / a-self-decode / a-fail" """
    assert takes(fallback=[1, 2, 3, 5]).fallback == tuple(LadderAction)
    for other in (0, 4, 6):
        assert refuses(fallback=[1, other])
    assert refuses(fallback=[])


def test_the_sampling_profile() -> None:
    """ "? top_p_milli: uint .le 1000" """
    assert takes(sampling={"top_p_milli": 1000}).sampling == ContractSampling(top_p_milli=1000)
    assert refuses(sampling={"top_p_milli": 1001})
    assert refuses(sampling={"temperature_milli": -1})


def test_the_scope() -> None:
    """ "? scope: bstr .size 16 ; KVSP Scope ID of cache objects" """
    assert takes(scope=bytes(16)).scope == bytes(16)
    assert refuses(scope=bytes(15))


def test_digests_are_octet_strings_of_32() -> None:
    """ "hash32 = bstr .size 32" """
    for member in ("target", "tokenizer"):
        for wrong in (bytes(31), bytes(33), "x" * 32, 1):
            assert refuses(**{member: wrong})


@pytest.mark.parametrize("member", sorted(cbor2.loads(WRITTEN_OUT)))
def test_what_has_no_question_mark_is_required(member: str) -> None:
    """ "contract = { target: hash32, ... }": eight members are not optional."""
    item = cbor2.loads(encode(session_open()))
    del item["contract"][member]
    with pytest.raises(BadContract, match=member):
        decode(cbor2.dumps(item), SessionOpen)
