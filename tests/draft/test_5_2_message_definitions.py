"""Draft 5.2, Message Definitions. The productions as a whole are compared in tests/protocol/test_sdcp_cddl.py."""

from typing import Any

import cbor2
import pytest

from sdcpd.protocol.draft_steps import Stop, StopReason
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import Assignment, Event, Output, Policy, Proposal, SessionOpen, Status, Verdict
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.terms import Action
from tests.support.draft_sessions import session
from tests.support.messages import DRAFTER, SESSION, assignment, proposal, session_open, status
from tests.support.verifying import Verifying


def changed(message: Any, **members: Any) -> bytes:
    return cbor2.dumps(cbor2.loads(encode(message)) | members)


VERDICT = Verdict(
    session=SESSION,
    epoch=1,
    round=1,
    accepted=0,
    emitted=(7,),
    committed=1,
    digest=bytes(32),
    action=Action.CONTINUE,
    m_cap=8,
    low=1,
    load=0,
)


@pytest.mark.parametrize("message", [session_open(), assignment(), proposal((5,)), status(), VERDICT])
def test_unknown_keys_are_ignored(message: Any) -> None:
    """ "Unknown map keys MUST be ignored, except in the contract" """
    assert decode(changed(message, x_later={"deep": [1, {"a": None}]}), type(message)) == message


def test_unknown_keys_inside_are_ignored_too() -> None:
    """The same sentence: `status` in a proposal, and a profile outside the contract (decision 6)."""
    item = cbor2.loads(encode(proposal((5,))))
    item["status"]["x_later"] = 1
    assert decode(cbor2.dumps(item), Proposal) == proposal((5,))
    policy = {"session": SESSION, "from_round": 3, "sampling": {"top_k": 4, "min_p": 1}}
    assert decode(cbor2.dumps(policy), Policy).sampling.top_k == 4
    assert decode(changed(assignment(), sampling={"min_p": 1}), Assignment) is not None


@pytest.mark.parametrize("value", [6, 7, 1000])
def test_an_unknown_action_is_fail(value: int) -> None:
    """ "A receiver that encounters an unknown action value MUST treat it as "fail"." """
    assert decode(changed(VERDICT, action=value), Verdict).action is Action.FAIL
    event = {"session": SESSION, "epoch": 1, "kind": value, "committed": 0, "digest": bytes(32)}
    assert decode(cbor2.dumps(event), Event).kind is Action.FAIL
    output = {"session": SESSION, "epoch": 1, "from": 0, "tokens": [], "final": True, "finish": value}
    assert decode(cbor2.dumps(output), Output).finish is Action.FAIL


def test_a_drafter_that_reads_an_unknown_action_stops() -> None:
    """The same sentence, carried out: the session has failed for this drafter."""
    machine = session()
    sent = machine.propose((7,), status())
    bench = Verifying(max_new=24)  # the contract of `session`
    bench.assign(DRAFTER)
    bench.submit(sent)
    bench.score(7, 8)
    bench.append()
    truth = bench.session.awaited(1)
    assert truth is not None
    step = machine.verdict(decode(changed(truth, action=77), Verdict), now=1.0)
    assert isinstance(step, Stop)
    assert step.reason is StopReason.FAILED


@pytest.mark.parametrize(
    ("message", "member", "wrong"),
    [
        (session_open(), "session", [bytes(15), bytes(17), "x" * 16, 1]),  # session-id = bstr .size 16
        (session_open(), "commit_log", [b"octets", 1, None]),  # cache-ref = tstr
        (session_open(), "prompt", [[-1], [True], [1.0], ["1"], 5, b"x", None]),  # [* uint] / cache-ref
        (session_open(), "resume", [{}, {"round": 1}, []]),
        (assignment(), "m_init", [-1, True, 1.0, "8"]),
        (proposal((5,)), "tokens", [[], 5, "x"]),  # [+ uint]
        (proposal((5,)), "base_digest", [bytes(31), "x" * 32]),
        (proposal((5,)), "status", [None, {}, 1]),
        (VERDICT, "load", [101, -1, True]),  # uint .le 100
        (VERDICT, "accepted", [-1, 0.0]),
        (status(), "role", [0, 3, True]),  # 1 / 2
        (status(), "accept_milli", [1001]),  # uint .le 1000
    ],
)
def test_types_are_as_printed(message: Any, member: str, wrong: list[Any]) -> None:
    """ "session-id = bstr .size 16", "tokens: [+ uint]", "load: uint .le 100", "role: 1 / 2" and the rest."""
    for value in wrong:
        with pytest.raises(IllFormed, match=member):
            decode(changed(message, **{member: value}), type(message))


@pytest.mark.parametrize("message", [session_open(), assignment(), proposal((5,)), status(), VERDICT])
def test_what_has_no_question_mark_is_required(message: Any) -> None:
    """ "session: session-id, epoch: uint, ..." """
    written = cbor2.loads(encode(message))
    for member in written:
        if member == "router":
            continue  # our own addition (decision 49)
        without = {key: value for key, value in written.items() if key != member}
        with pytest.raises(IllFormed, match=member):
            decode(cbor2.dumps(without), type(message))


def test_a_prompt_is_tokens_or_a_reference() -> None:
    """ "prompt: [* uint] / cache-ref, ; tokens or MLC reference" """
    ref = "https://c.example/cache/v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/0/tokens"
    assert decode(changed(session_open(), prompt=ref), SessionOpen).prompt == ref
    assert decode(changed(session_open(), prompt=[3, 4]), SessionOpen).prompt == (3, 4)
    assert decode(changed(assignment(), prompt=ref), Assignment).prompt == ref


def test_final_is_a_truth_value_and_no_number() -> None:
    """ "final: bool, ? finish: action" """
    output = {"session": SESSION, "epoch": 1, "from": 0, "tokens": [], "final": 1}
    with pytest.raises(IllFormed, match="final"):
        decode(cbor2.dumps(output), Output)
    assert decode(cbor2.dumps(output | {"final": False}), Output).final is False


def test_a_status_names_its_role_and_how_long_it_counts() -> None:
    """ "status = { instance: tstr, role: 1 / 2, load: uint .le 100, queue: uint, ... ttl_ms: uint }" """
    found = decode(cbor2.dumps({"instance": "x", "role": 2, "load": 100, "queue": 0, "ttl_ms": 1}), Status)
    assert (found.role, found.load, found.ttl_ms) == (2, 100, 1)
