"""Strict CBOR in, deterministic CBOR out (draft 4.1, 5.2; decisions 1 to 7; RFC 8949 4.2.1)."""

import contextlib
import time
from typing import Any

import cbor2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol import commit_log, encoding, messages
from sdcpd.protocol.messages import (
    Contract,
    ContractSampling,
    Event,
    InlineRow,
    Output,
    Proposal,
    SessionOpen,
    SpeculationStats,
)
from sdcpd.protocol.problems import BadContract, IllFormed
from sdcpd.protocol.terms import Action
from tests.support.messages import assignment, contract, proposal, session_open

STATS = SpeculationStats(rounds=3, drafts=2, draft_tokens=9, accepted_tokens=4, accepted_histogram=(0, 1))


def as_map(message: msgspec.Struct) -> dict[str, Any]:
    item = cbor2.loads(encoding.encode(message))
    assert isinstance(item, dict)
    return item


def test_round_trip_keeps_absent_members_absent() -> None:
    message = session_open()
    assert encoding.decode(encoding.encode(message), SessionOpen) == message
    assert "low_ratio" not in as_map(message)["contract"]
    assert as_map(session_open(contract=contract(low_ratio=0)))["contract"]["low_ratio"] == 0


@given(st.permutations(list(as_map(session_open()).items())))
def test_any_key_order_in_gives_one_order_out(items: list[tuple[str, Any]]) -> None:
    message = encoding.decode(cbor2.dumps(dict(items)), SessionOpen)
    assert encoding.encode(message) == encoding.encode(session_open())


def test_every_key_is_text_short_enough_for_one_order() -> None:
    """Length-first and bytewise order agree only while all keys are text under 24 octets (decision 2)."""
    kinds = [
        kind
        for module in (messages, commit_log)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    assert len(kinds) > 15
    for kind in kinds:
        for name in (field.encode_name for field in msgspec.structs.fields(kind)):
            assert name.isascii()
            assert 0 < len(name) < 24, name


@pytest.mark.parametrize(
    "message",
    [
        contract(low_ratio=5, stop=(), sampling=ContractSampling(seed=1, top_k=2)),
        session_open(),
        assignment(seq=3),
        proposal((1, 2, 300)),
        proposal((1, 2), q=(InlineRow(ids=(1, 7), values=bytes(8)), InlineRow(ids=(2,), values=bytes(4)))),
        Output(session=bytes(16), epoch=1, from_=2, tokens=(5,), final=True, stats=STATS),
    ],
)
def test_the_order_is_that_of_the_librarys_canonical_mode(message: msgspec.Struct) -> None:
    slow = cbor2.dumps(msgspec.to_builtins(message, builtin_types=(bytes,)), canonical=True)
    assert encoding.encode(message) == slow


def test_encoding_is_core_deterministic() -> None:
    """Keys sorted by their encoded octets, shortest integers, definite lengths (RFC 8949 4.2.1)."""
    octets = encoding.encode(contract())
    keys = [cbor2.dumps(key) for key in cbor2.loads(octets)]
    assert keys == sorted(keys)
    assert octets[0] == 0xA0 + len(keys)


@pytest.mark.parametrize("value", [True, 1.0, "1", b"\x01", None, [1], -1, cbor2.CBORTag(2, b"\x01")])
def test_numbers_are_exact(value: object) -> None:
    item = as_map(session_open()) | {"epoch": value}
    with pytest.raises(IllFormed):
        encoding.decode(cbor2.dumps(item), SessionOpen)


@pytest.mark.parametrize("value", [True, 4.0, "4", 0, 65, -1])
def test_contract_schema_errors_are_bad_contract(value: object) -> None:
    item = as_map(session_open())
    item["contract"]["m_max"] = value
    with pytest.raises(BadContract, match="m_max"):
        encoding.decode(cbor2.dumps(item), SessionOpen)


@pytest.mark.parametrize("path", [("contract",), ("contract", "sampling")])
def test_unknown_keys_are_refused_in_the_contract_at_both_levels(path: tuple[str, ...]) -> None:
    item = as_map(session_open(contract=contract(sampling=messages.ContractSampling(top_k=4))))
    place = item
    for step in path:
        place = place[step]
    place["extra"] = 1
    with pytest.raises(BadContract, match="extra"):
        encoding.decode(cbor2.dumps(item), SessionOpen)


def test_unknown_keys_elsewhere_are_ignored() -> None:
    item = as_map(proposal((5,))) | {"x_new": {"deep": [1, 2]}}
    item["status"]["x_too"] = 1
    assert encoding.decode(cbor2.dumps(item), Proposal) == proposal((5,))


def test_unknown_action_is_fail() -> None:
    item = {"session": bytes(16), "epoch": 1, "kind": 9, "committed": 0, "digest": bytes(32)}
    assert encoding.decode(cbor2.dumps(item), Event).kind is Action.FAIL


def test_unknown_action_in_a_ladder_is_a_contract_error() -> None:
    item = as_map(session_open())
    item["contract"]["fallback"] = [1, 9]
    with pytest.raises(BadContract, match="fallback"):
        encoding.decode(cbor2.dumps(item), SessionOpen)


TAGS = (*range(70), 100, 256, 258, 259, 260, 261, 1004, 1040, 43000, 55799, 55800, 55801, 65535, 2**32, 2**63)


@pytest.mark.parametrize("tag", TAGS)
def test_no_tag_is_resolved(tag: int) -> None:
    for content in (b"\x01", 1, "2020-01-01", [1, 2], {"a": 1}):
        with pytest.raises(IllFormed):
            encoding.load(cbor2.dumps({"a": cbor2.CBORTag(tag, content)}))


@pytest.mark.parametrize(
    "octets",
    [
        pytest.param(bytes.fromhex("9affffffff"), id="array of 4 G items"),
        pytest.param(bytes.fromhex("9bffffffffffffffff"), id="array of 2^64 items"),
        pytest.param(bytes.fromhex("bbffffffffffffffff"), id="map of 2^64 pairs"),
        pytest.param(bytes.fromhex("5bffffffffffffffff"), id="octets of 2^64"),
        pytest.param(b"\x81" * 100_000 + b"\x00", id="deep nesting"),
        pytest.param(bytes.fromhex("a2616101616102"), id="duplicate key"),
        pytest.param(bytes.fromhex("bf616101616102ff"), id="duplicate key, indefinite"),
        pytest.param(bytes.fromhex("0100"), id="octets after the item"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x61\xff", id="not UTF-8"),
        pytest.param(b"\xff", id="break without a start"),
        pytest.param(bytes.fromhex("a10101"), id="integer key"),
        pytest.param(bytes.fromhex("1c"), id="reserved additional information"),
    ],
)
def test_hostile_bodies_are_refused_quickly(octets: bytes) -> None:
    started = time.process_time()
    with pytest.raises(IllFormed):
        encoding.load(octets)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("key", [1, -1, b"x", (1, 2)], ids=repr)
@pytest.mark.parametrize("nested", [False, True])
def test_a_key_of_a_contract_that_is_not_text_is_an_unknown_key(key: object, nested: bool) -> None:
    """Decision 1; outside the contract the message is ill-formed."""
    message: dict[Any, Any] = cbor2.loads(encoding.encode(session_open()))
    table = message["contract"].setdefault("sampling", {}) if nested else message["contract"]
    table[key] = 0
    with pytest.raises(BadContract, match="contract: "):
        encoding.decode(cbor2.dumps(message), SessionOpen)
    del table[key]
    message[key] = 0
    with pytest.raises(IllFormed):
        encoding.decode(cbor2.dumps(message), SessionOpen)


@given(st.binary(max_size=64))
def test_any_octets_give_an_item_or_a_problem(octets: bytes) -> None:
    for kind in (SessionOpen, Proposal, Contract, tuple[int, ...]):
        with contextlib.suppress(IllFormed, BadContract):
            encoding.decode(octets, kind)


@given(st.lists(st.integers(0, 2**32 - 1)).map(tuple))
def test_token_objects_round_trip(tokens: tuple[int, ...]) -> None:
    """The content of a prompt or committed_tokens object is the array that could have stood inline (decision 25)."""
    assert encoding.decode_tokens(encoding.encode_tokens(tokens)) == tokens
    assert encoding.encode_tokens(tokens) == cbor2.dumps(list(tokens))


@pytest.mark.parametrize("item", [[-1], [1.0], [True], ["1"], 1, {}, [cbor2.CBORTag(2, b"\x01")]])
def test_token_objects_hold_nothing_but_tokens(item: object) -> None:
    """A negative number would not fit uint32() of the digest chain, and whoever hashed it would be the one to fall."""
    with pytest.raises(IllFormed):
        encoding.decode_tokens(cbor2.dumps(item))
