"""Every octet that the roles send in a whole cluster, judged by the project's CDDL."""

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path

import cbor2
import pytest
import trio
from trio.testing import MockClock

from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.commit_log import CommitRecord, EndRecord, FenceRecord, read_records
from sdcpd.protocol.encoding import MEDIA_TYPE
from sdcpd.protocol.ladder import Ladder
from sdcpd.roles.generation import GenerationRequest
from tests.support import schema
from tests.support.cluster import MODEL, OracleSource, running_cluster, verifier_uri
from tests.support.tap import listen
from tests.support.toy_engine import VOCABULARY, greedy

BODIES = {
    r"POST sessions": ("session-open", "session-state"),
    r"PUT sessions/[^/]+/drafter": ("assignment", "session-state"),
    r"POST sessions/[^/]+/policy": ("policy", "session-state"),
    r"POST proposals": ("proposal", "verdict"),
    r"GET sessions/[^/]+/output": (None, "output"),
    r"GET sessions/[^/]+": (None, "session-state"),
    r"DELETE sessions/[^/]+": (None, None),
    r"POST assignments": ("assignment", None),
    r"DELETE assignments/[^/]+": (None, None),
    r"PUT instances/[^/]+/status": ("status", None),
    r"POST events": ("event", None),
}
"""Table 1 and our additions to it: body and answer."""


class Tap:
    """Judges what goes over a network. `seen` counts the items by production."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.foreign: list[str] = []

    def judge(self, octets: bytes, production: str, where: str) -> None:
        fault = schema.complaint(octets, production, closed=True)
        assert fault is None, f"{where}: {production}: {fault}; is a new member missing in sdcp.cddl?"
        assert octets == cbor2.dumps(cbor2.loads(octets), canonical=True), f"{where}: not deterministic"
        self.seen[production] = self.seen.get(production, 0) + 1

    def exchange(self, request: Request, response: Response) -> None:
        where = f"{request.method} {request.path}"
        if request.path.startswith("v1/"):
            self._object(where, request, response)
            return
        if request.path.startswith("leases"):
            self._lease(where, request, response)
            return
        body, answer = next(kinds for pattern, kinds in BODIES.items() if re.fullmatch(pattern, where))
        assert bool(request.body) == (body is not None)
        if body is not None:
            assert request.headers["content-type"] == MEDIA_TYPE
            self.judge(request.body, body, where)
        if response.status >= 300:
            self._problem(where, response)
        elif answer is None:
            assert response.body == b"", where
        else:
            assert response.headers["content-type"] == MEDIA_TYPE
            self.judge(response.body, answer, where)

    def _lease(self, where: str, request: Request, response: Response) -> None:
        if request.body:
            self.judge(request.body, "lease-request" if request.method == "POST" else "lease-renewal", where)
        if response.body and response.status < 300:
            self.judge(response.body, "lease-answer", where)

    def _problem(self, where: str, response: Response) -> None:
        assert response.headers["content-type"] == "application/problem+json", where
        members = json.loads(response.body)
        if "session-state" in members:
            text = members["session-state"]
            self.judge(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), "session-state", where)

    def _object(self, where: str, request: Request, response: Response) -> None:
        if re.match(r"GET v1/s/[^/]+/d/?(\?|$)", where) and response.status == 200:
            self.judge(response.body, "directory-answer", where)
        elif re.match(r"PUT v1/s/[^/]+/d/", where):
            self.judge(request.body, "directory-record", where)
        elif request.path.endswith("/tokens") and request.method == "PUT":
            self.judge(request.body, "tokens", where)
        elif re.match(r"v1/s/[^/]+/l/", request.path) and request.body:
            for record, octets in read_records(request.body):
                production = schema.PRODUCTIONS[type(record)]
                self.judge(octets, production, where)


async def test_whatever_a_cluster_says_validates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A wrong drafter climbs the ladder, one dies, a client leaves, a session fails: all messages and records."""
    heard = listen(monkeypatch)

    def half_right(context: Sequence[int], limit: int) -> list[int]:
        tokens = greedy(context, limit)
        return [*tokens[: limit // 2], *((token + 1) % VOCABULARY for token in tokens[limit // 2 :])]

    def wrong(context: Sequence[int], limit: int) -> list[int]:
        return [(token + 1) % VOCABULARY for token in greedy(context, limit)]

    ladder = Ladder(fallback=("reduce", "switch", "self_decode", "fail"), low_rounds=1, self_max=3)
    with trio.fail_after(1000):
        async with running_cluster(
            tmp_path, [OracleSource(wrong), OracleSource(wrong), OracleSource(half_right)], ladder=ladder
        ) as cluster:
            for number in range(4):
                await cluster.generate((5, 6, 7, number), 60)
            for drafter in cluster.drafters.values():
                drafter._shelf._remember(verifier_uri(0))  # as if it did not know `sdcpd_q`: rows go by reference too
            await cluster.generate((5, 6, 7, 9), 60, rule=2, seed=4, temperature_milli=1000)
            request = GenerationRequest(model=MODEL, prompt=(5, 6, 7, 8), max_new=200, stop=())
            async with cluster.router.generation(request) as generation:
                async for _ in generation.pages():
                    break
            await trio.sleep(30)
    tap = Tap()
    for exchange in heard:
        tap.exchange(exchange.request, exchange.response)
    expected = {
        "session-open",
        "session-state",
        "assignment",
        "proposal",
        "verdict",
        "output",
        "status",
        "event",
        "tokens",
        schema.PRODUCTIONS[CommitRecord],
        schema.PRODUCTIONS[EndRecord],
        "directory-record",
        "directory-answer",
        "lease-request",
        "lease-answer",
        "policy",
    }
    assert set(tap.seen) - {schema.PRODUCTIONS[FenceRecord]} == expected, tap.seen
