"""Problem details out and in (RFC 9457; decisions 34, 36)."""

import json

import cbor2
import pytest

from sdcpd.edge.problem_body import DETAIL_LIMIT_CHARACTERS, problem_response, refusal
from sdcpd.edge.transport import Response
from sdcpd.protocol import problems
from sdcpd.protocol.problems import IllFormed, LimitExceeded, Overloaded, Problem, StaleBase
from sdcpd.roles.ports import Refusal
from tests.edge.services import STATE

CLASSES = [
    one for one in vars(problems).values() if isinstance(one, type) and issubclass(one, Problem) and one is not Problem
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_problem_crosses_the_wire(kind: type[Problem]) -> None:
    response = problem_response(kind("because"))
    members = json.loads(response.body)
    assert response.status == members["status"] == kind.status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["cache-control"] == "no-store"
    assert members["type"] == (
        "about:blank" if kind.suffix is None else f"https://iana.org/assignments/http-problem-types#{kind.suffix}"
    )
    assert refusal(response) == Refusal(status=kind.status, suffix=kind.suffix, detail="because")


def test_a_conflict_carries_the_session_state() -> None:
    """Decision 34: "member `session-state` = base64url of the CBOR map, plus plain round, committed, epoch"."""
    response = problem_response(StaleBase("base 3 is not 7", state=STATE))
    members = json.loads(response.body)
    assert (members["round"], members["committed"], members["epoch"]) == (3, 7, 1)
    assert "=" not in members["session-state"]
    assert refusal(response).state == STATE


def test_a_limit_names_itself_and_an_overload_its_time() -> None:
    """Decision 36."""
    assert refusal(problem_response(LimitExceeded("M is 9", m_cap=4))).m_cap == 4
    overloaded = problem_response(Overloaded("later", retry_after_s=3))
    assert overloaded.headers["retry-after"] == "3"
    assert refusal(overloaded).retry_after_s == 3


@pytest.mark.parametrize(
    ("type_", "suffix"),
    [
        ("https://iana.org/assignments/http-problem-types#sdcp-stale-base", "sdcp-stale-base"),
        ("https://example.net/problems/sdcp-stale-base", "sdcp-stale-base"),
        ("urn:x:sdcp-stale-base", "sdcp-stale-base"),
        ("sdcp-stale-base", "sdcp-stale-base"),
        ("https://example.net/sdcp-stale-base/more", None),
        ("about:blank", None),
        ("", None),
        (5, None),
        (None, None),
    ],
)
def test_the_suffix_alone_is_matched(type_: object, suffix: str | None) -> None:
    body = json.dumps({"type": type_, "detail": "d", "unheard-of": [1]}).encode()
    assert refusal(Response(status=409, body=body)) == Refusal(status=409, suffix=suffix, detail="d")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"detail": 5, "session-state": 7, "m_cap": "x"}',
        b'{"session-state": "!!!!", "m_cap": true}',
        b'{"session-state": "oA", "m_cap": 0}',
        b'{"detail": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_a_body_that_is_no_problem_is_still_a_refusal(body: bytes) -> None:
    assert refusal(Response(status=502, body=body)) == Refusal(status=502, suffix=None, detail="status 502")


@pytest.mark.parametrize("value", ["", "Fri, 01 Jan 2027 00:00:00 GMT", "-1", "1.5", "\u0663", "9" * 30])
def test_a_retry_after_that_is_no_number_of_seconds_is_ignored(value: str) -> None:
    assert refusal(Response(status=503, headers={"retry-after": value})).retry_after_s is None


def test_details_are_cut() -> None:
    response = problem_response(IllFormed("x" * 10_000))
    assert len(json.loads(response.body)["detail"]) == DETAIL_LIMIT_CHARACTERS


CONCISE = "application/concise-problem-details+cbor"


def test_the_cbor_form_holds_the_same_members() -> None:
    """RFC 9290, appendix: title and detail as -1 and -2, the rest under 7807, type and status there as 0 and 1."""
    problem = StaleBase("base 3 is not 7", state=STATE)
    members = json.loads(problem_response(problem).body)
    concise = problem_response(problem, CONCISE)
    assert concise.headers["content-type"] == CONCISE
    assert cbor2.loads(concise.body) == {
        -1: members.pop("title"),
        -2: members.pop("detail"),
        7807: {0: members.pop("type"), 1: members.pop("status"), **members},
    }
    assert members.keys() == {"session-state", "round", "committed", "epoch"}
    assert cbor2.loads(problem_response(LimitExceeded("M is 9", m_cap=4), CONCISE).body)[7807]["m_cap"] == 4
    assert problem_response(Overloaded("later", retry_after_s=3), CONCISE).headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("accept", "concise"),
    [
        (CONCISE, True),
        (f"application/sdcp+cbor, {CONCISE.upper()}", True),
        (f"{CONCISE};q=0.5, */*;q=0.1", True),
        (f"{CONCISE}; q=0.5, application/problem+json; q=0.4", True),
        (f"{CONCISE}, application/problem+json", False),  # as wanted as the other: ours to choose
        (f"{CONCISE};q=0", False),
        (f"{CONCISE}x", False),
        ("application/problem+json", False),
        ("application/*, */*", False),
        ("", False),
    ],
)
def test_the_cbor_form_is_only_for_who_asks(accept: str, concise: bool) -> None:
    """Decision 34."""
    answer = problem_response(IllFormed("x"), accept)
    assert answer.headers["content-type"] == (CONCISE if concise else "application/problem+json")
