"""The messages against an independent reader of the CDDL: what pycddl refuses we refuse, and why we differ elsewhere.

pycddl judges one item at the schema's word and has gaps of its own (it looks neither at duplicate keys nor behind the
item, and not into every choice). So the comparison is one-sided, as it should be: whatever it refuses must be
refused by us, unless a named rule of the draft has us read it.
"""

import re
from typing import Any

import cbor2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, inspect

from sdcpd.edge import cache_messages
from sdcpd.protocol import commit_log, directory, messages
from sdcpd.protocol.commit_log import CommitRecord, EndRecord, FenceRecord, write_record
from sdcpd.protocol.encoding import decode, decode_tokens, encode, encode_tokens
from sdcpd.protocol.messages import Contract, Event, Output, Proposal, SessionOpen, Status, Verdict
from sdcpd.protocol.problems import BadContract, IllFormed
from sdcpd.protocol.terms import Action
from tests.support import schema
from tests.support.messages import contract, proposal, session_open, status

KINDS = list(schema.PRODUCTIONS)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Plain values that fit a type, as msgspec describes it; optional members are sometimes absent."""
    match kind:
        case inspect.StructType():
            needed = {field.encode_name: values_of(field.type) for field in kind.fields if field.required}
            absent = {field.encode_name: values_of(field.type) for field in kind.fields if not field.required}
            return st.fixed_dictionaries(needed, optional=absent)
        case inspect.UnionType(types=types):
            return st.one_of([values_of(one) for one in types])
        case inspect.EnumType(cls=cls):
            return st.sampled_from([member.value for member in cls])
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.IntType(ge=least, le=most, lt=beyond):
            last = most if most is not None else 2**64 - 1 if beyond is None else beyond - 1
            return st.integers(least if least is not None else 0, last)
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=most)
        case inspect.StrType(pattern=str() as pattern):
            return st.from_regex(pattern.removesuffix("$"), fullmatch=True)
        case inspect.StrType(min_length=least):
            return st.text(min_size=least or 0, max_size=20)
        case inspect.VarTupleType(item_type=item, min_length=least):
            return st.lists(values_of(item), min_size=least or 0, max_size=4)
        case inspect.BoolType():
            return st.booleans()
        case _:
            raise AssertionError(f"the schema check does not know {kind}; teach it")


VALUES = {kind: values_of(inspect.type_info(kind)) for kind in KINDS}


def message_of(draw: Any, kind: type[Struct]) -> Struct:
    item = draw(VALUES[kind])
    item = {**item, "end": draw(st.sampled_from([4, 5]))} if kind is EndRecord else item
    message: Struct = msgspec.convert(item, kind, builtin_types=(bytes,))
    return message


def refused_by_us(octets: bytes, kind: type[Struct]) -> bool:
    try:
        decode(octets, kind)
    except (IllFormed, BadContract):
        return True
    return False


def test_the_file_has_a_production_for_every_struct() -> None:
    structs = {
        kind
        for module in (messages, commit_log, directory, cache_messages)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, messages.Message | Contract | messages.ContractSampling)
    }
    assert structs - {messages.Message} == set(schema.PRODUCTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_and_the_struct_list_the_same_members(kind: type[Struct]) -> None:
    """Optional where it is optional there: the file may not lag behind the code, nor the code behind the file."""
    found = re.search(rf"^{schema.PRODUCTIONS[kind]}\s*=\s*\{{(.*?)\}}", re.sub(";.*", "", schema.text()), re.M | re.S)
    assert found is not None
    listed = {name: not optional for optional, name in re.findall(r"(\?\s*)?\b(\w+)\"?:", found.group(1))}
    ours = {field.encode_name: field.required for field in msgspec.structs.fields(kind)}
    assert listed == ours


# What we emit


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_whatever_can_be_said_validates_and_reads_back(kind: type[Struct], data: st.DataObject) -> None:
    message = message_of(data.draw, kind)
    octets = encode(message)
    assert schema.complaint(octets, schema.PRODUCTIONS[kind], closed=True) is None
    assert decode(octets, kind) == message
    assert encode(decode(octets, kind)) == octets


@given(st.lists(st.integers(0, 2**32 - 1)).map(tuple))
def test_token_objects_validate(tokens: tuple[int, ...]) -> None:
    assert schema.complaint(encode_tokens(tokens), "tokens") is None


def test_the_closed_reading_does_find_a_key_that_is_not_listed() -> None:
    """Else the tests above could not fail."""
    item = cbor2.loads(encode(session_open())) | {"x_new": 1}
    assert schema.complaint(cbor2.dumps(item), "session-open") is None
    assert schema.complaint(cbor2.dumps(item), "session-open", closed=True) is not None


# What pycddl refuses, we refuse

STRANGE: list[object] = [
    True,
    False,
    None,
    1.0,
    0.5,
    -1,
    0,
    1,
    2,
    65,
    101,
    1001,
    2**32,
    2**64,
    -(2**64) - 1,
    "",
    "x",
    b"",
    b"x" * 15,
    b"x" * 16,
    b"x" * 33,
    [],
    [True],
    [1.0],
    [-1],
    [2**64],
    ["x"],
    [[]],
    {},
    {"x": 1},
    cbor2.CBORTag(2, b"\x01"),
    cbor2.CBORTag(1, 0),
    cbor2.CBORTag(55799, 1),
    cbor2.undefined,
    cbor2.CBORSimpleValue(99),
]

ACTIONS_READ_AS_FAIL = {(Verdict, "action"), (Output, "finish"), (Event, "kind"), (commit_log.Control, "action")}
"""5.2: "A receiver that encounters an unknown action value MUST treat it as "fail"." """
ENDS_READ = {(EndRecord, "end")}
"""An end record of whatever value closes the log (85, 91): not reading it would reopen a session that has ended."""


def maps_in(item: object) -> list[dict[Any, Any]]:
    if isinstance(item, dict):
        return [item, *(found for value in item.values() for found in maps_in(value))]
    return [found for value in item for found in maps_in(value)] if isinstance(item, list) else []


def is_read_on_purpose(kind: type[Struct], key: object, value: object, place: int) -> bool:
    """Unknown integers as an action: the one thing outside the schema that has to be read."""
    known = ACTIONS_READ_AS_FAIL | ENDS_READ
    here = (kind, key) if place == 0 else (commit_log.Control, key)
    return here in known and isinstance(value, int) and not isinstance(value, bool) and -(2**64) <= value < 2**64


def spoil(data: st.DataObject, kind: type[Struct], item: dict[str, Any]) -> bool:
    """Change one thing in `item`. Returns whether the draft has us read the result whatever the schema says."""
    every = maps_in(item)
    place = data.draw(st.integers(0, len(every) - 1))
    where = every[place]
    change = data.draw(st.sampled_from(["replace", "inside", "drop", "integer key", "octet key"]))
    if change == "integer key":
        where[data.draw(st.integers(-3, 3))] = 1
    elif change == "octet key":
        where[b"session"] = 1
    elif where:
        key = data.draw(st.sampled_from(list(where)))
        if change == "drop":
            del where[key]
        elif change == "inside" and isinstance(where[key], list):
            where[key].append(data.draw(st.sampled_from(STRANGE)))
        else:
            where[key] = data.draw(st.sampled_from(STRANGE))
            return is_read_on_purpose(kind, key, where[key], place)
    return False


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_pycddl_refuses_we_refuse(kind: type[Struct], data: st.DataObject) -> None:
    item = cbor2.loads(encode(message_of(data.draw, kind)))
    on_purpose = spoil(data, kind, item)
    octets = cbor2.dumps(item)
    if schema.complaint(octets, schema.PRODUCTIONS[kind]) is not None and not on_purpose:
        assert refused_by_us(octets, kind)


@given(st.sampled_from(STRANGE))
def test_token_objects_are_as_strict(value: object) -> None:
    octets = cbor2.dumps([1, value])
    if schema.complaint(octets, "tokens") is not None:
        with pytest.raises(IllFormed):
            decode_tokens(octets)


# Where we differ, each with its reason


def changed(message: Struct, **members: Any) -> bytes:
    return cbor2.dumps(cbor2.loads(encode(message)) | members)


EVENT = Event(session=bytes(16), epoch=1, kind=Action.SWITCH, committed=0, digest=bytes(32))
VERDICT = Verdict(
    session=bytes(16),
    epoch=1,
    round=1,
    accepted=0,
    emitted=(1,),
    committed=1,
    digest=bytes(32),
    action=Action.CONTINUE,
    m_cap=1,
    low=0,
    load=0,
)


@pytest.mark.parametrize("value", [6, 255, 2**64 - 1, -1])
@pytest.mark.parametrize(("message", "member"), [(EVENT, "kind"), (VERDICT, "action")])
def test_laxer_an_unknown_action_is_read_as_fail(message: Struct, member: str, value: int) -> None:
    """5.2: "A receiver that encounters an unknown action value MUST treat it as "fail"." """
    octets = changed(message, **{member: value})
    assert schema.complaint(octets, schema.PRODUCTIONS[type(message)]) is not None
    assert getattr(decode(octets, type(message)), member) is Action.FAIL


def test_laxer_an_end_record_of_any_value_closes_the_log() -> None:
    octets = changed(EndRecord(epoch=1, end=Action.FAIL), end=9)
    assert schema.complaint(octets, "end-record") is not None
    assert decode(octets, EndRecord).end is Action.FAIL


def bad_contract(**members: Any) -> tuple[bytes, type[Struct]]:
    item = cbor2.loads(encode(session_open()))
    item["contract"] |= members
    return cbor2.dumps(item), SessionOpen


def raw(message: Struct, old: str, new: str) -> tuple[bytes, type[Struct]]:
    octets = encode(message)
    assert octets.count(bytes.fromhex(old)) == 1
    return octets.replace(bytes.fromhex(old), bytes.fromhex(new)), type(message)


EPOCH_1 = "6565706f6368" + "01"

STRICTER: list[Any] = [
    pytest.param(bad_contract(m_max=0), id="14: m_max 0 contradicts 1 <= M"),
    pytest.param(bad_contract(self_max=0), id="14: self_max 0 would send events for ever"),
    pytest.param(bad_contract(stop=[0] * 1025), id="21: arrays of a contract are bounded"),
    pytest.param(bad_contract(fallback=[1] * 1025), id="103: a ladder has at most 1,024 entries"),
    pytest.param((changed(status(), instance=""), Status), id="27: an empty text is no base URI"),
    pytest.param((changed(session_open(), commit_log="c" * 2049), SessionOpen), id="21: references are bounded"),
    pytest.param((encode(EVENT) + b"\x00", Event), id="4: octets after the item (pycddl stops reading)"),
    pytest.param((b"\xa6" + encode(EVENT)[1:] + bytes.fromhex(EPOCH_1), Event), id="4: a key twice (it keeps one)"),
    pytest.param((changed(EVENT, x_new=cbor2.CBORTag(1, 0)), Event), id="4: a tag where anything may stand"),
    pytest.param((changed(EVENT, x_new=2**64), Event), id="4: a bignum where anything may stand"),
    pytest.param((changed(EVENT, x_new={1: 1}), Event), id="1: an integer key where anything may stand"),
    pytest.param((changed(proposal((1,)), tokens=[2**64]), Proposal), id="4: a bignum in an array (it looks away)"),
    pytest.param((changed(EVENT, digest="x" * 32), Event), id="text for octets of the right size (it looks away)"),
    pytest.param((changed(EVENT, kind=[1]), Event), id="an array for a choice of numbers (it looks away)"),
    pytest.param((changed(session_open(), prompt=["x"]), SessionOpen), id="a prompt of texts (it looks away)"),
    pytest.param((changed(session_open(), prompt=[True]), SessionOpen), id="true for token 1 (it looks away)"),
]


@pytest.mark.parametrize("case", STRICTER)
def test_stricter(case: tuple[bytes, type[Struct]]) -> None:
    octets, kind = case
    assert schema.complaint(octets, schema.PRODUCTIONS[kind]) is None, "no difference any more: drop this case"
    assert refused_by_us(octets, kind)


def test_unknown_keys_are_refused_in_the_contract_alone() -> None:
    """5.2: "Unknown map keys MUST be ignored, except in the contract" """
    assert schema.complaint(changed(EVENT, x_new=1), "event") is None
    assert decode(changed(EVENT, x_new=1), Event) == EVENT
    for members in ({"x_new": 1}, {"sampling": {"top_k": 1, "x_new": 1}}, {"m-max": 8}):
        octets, kind = bad_contract(**members)
        assert schema.complaint(octets, "session-open") is not None
        with pytest.raises(BadContract):
            decode(octets, kind)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(EPOCH_1, "6565706f6368" + "1801", id="an integer longer than it need be"),
        pytest.param(EPOCH_1, "6565706f6368" + "1b0000000000000001", id="an integer in eight octets"),
        pytest.param(EPOCH_1, "7f626570636f6368ff" + "01", id="a key in pieces"),
    ],
)
def test_looser_encodings_of_the_same_content_are_read_by_both(old: str, new: str) -> None:
    """Decision 3: the digest is over the item, re-encoded; a peer's longer integers change nothing."""
    octets, kind = raw(EVENT, old, new)
    assert schema.complaint(octets, "event") is None
    assert decode(octets, kind) == EVENT


def test_indefinite_lengths_are_read_by_both_and_hash_alike() -> None:
    """Maps, arrays, octets and texts in pieces: well-formed, not deterministic, the same content."""
    definite = encode(contract())
    indefinite = b"\xbf" + definite[1:] + b"\xff"
    assert schema.complaint(indefinite, "contract") is None
    assert encode(decode(indefinite, Contract)) == definite
    pieces = encode(EVENT).replace(b"\x50" + bytes(16), b"\x5f\x48" + bytes(8) + b"\x48" + bytes(8) + b"\xff")
    assert pieces != encode(EVENT)
    assert schema.complaint(pieces, "event") is None
    assert decode(pieces, Event) == EVENT


def test_records_validate_by_their_kind() -> None:
    fence = write_record(FenceRecord(epoch=2, by="https://r.example/router/ 1"))
    assert schema.complaint(fence, "fence-record", closed=True) is None
    assert schema.complaint(fence, "commit-record") is not None
    commit = CommitRecord(epoch=1, round=1, emitted=(5,), committed=1, digest=bytes(32))
    assert schema.complaint(write_record(commit), "commit-record", closed=True) is None
    assert schema.complaint(write_record(commit), "end-record") is not None
