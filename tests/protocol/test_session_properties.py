"""Any message in any state gives a verdict, a problem or an end, and the invariants of one session always hold."""

import contextlib
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, log_tag, read_records, view, write_record
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Begin, Replay, SessionLimits, Settled, Work
from sdcpd.protocol.terms import Action, LadderAction
from tests.support.messages import DRAFTER, OTHER_DRAFTER, VERIFIER, assignment, contract, proposal, session_open

PROMPT = (1, 1, 1)
VOCABULARY = 6
LOADS = st.integers(0, 100)


def target(prefix: list[int]) -> int:
    """What the target says next: arbitrary, but a function of the prefix alone."""
    return (sum(prefix[-2:]) * 3 + len(prefix)) % VOCABULARY


class OneSession(RuleBasedStateMachine):
    """Drives a session with honest and dishonest messages against a log that keeps the rules of 6.8."""

    @initialize(
        fallback=st.lists(st.sampled_from(list(LadderAction)), min_size=1, max_size=4),
        low_rounds=st.integers(1, 3),
        max_new=st.integers(0, 25),
        stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=1),
        self_load=st.one_of(st.none(), st.integers(0, 100)),
    )
    def open(
        self, fallback: list[LadderAction], low_rounds: int, max_new: int, stop: list[int], self_load: int | None
    ) -> None:
        extra: dict[str, Any] = {} if self_load is None else {"self_load": self_load, "self_max": 3}
        self.contract = contract(
            fallback=tuple(fallback), low_rounds=low_rounds, max_new=max_new, stop=tuple(stop), m_max=4, **extra
        )
        self.now = 0.0
        self.log: list[bytes] = []
        self.session = Session(
            session_open(contract=self.contract),
            instance=VERIFIER,
            prompt=PROMPT,
            vocabulary=VOCABULARY,
            limits=SessionLimits(),
            log_tag=log_tag(()),
            now=0.0,
        )
        self.work: Work | None = None
        self.seen: dict[int, bytes] = {}
        self.sent: list[Proposal] = []
        self.visible: list[int] = []
        self.seq = 0

    def accept(self, sent: Proposal) -> None:
        self.sent.append(sent)
        try:
            answer = self.session.propose(DRAFTER, sent, self.now)
        except Problem:
            return
        if isinstance(answer, Begin):
            self.work = answer.work
        elif isinstance(answer, Replay):
            octets = encode(answer.verdict)
            assert self.seen.setdefault(sent.round, octets) == octets, "a round has one verdict for ever"

    @rule(drafter=st.sampled_from([DRAFTER, OTHER_DRAFTER, VERIFIER]), m_init=st.integers(0, 5), step=st.integers(0, 1))
    def assign(self, drafter: str, m_init: int, step: int) -> None:
        self.seq += step
        with contextlib.suppress(Problem):
            self.session.assign(
                assignment(contract=self.contract, drafter=drafter, m_init=m_init, seq=self.seq), self.now
            )

    @rule(count=st.integers(1, 4), wrong=st.integers(0, 4))
    def propose(self, count: int, wrong: int) -> None:
        at = self.session.prefix.at
        known = [*PROMPT, *self.session.prefix.output]
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(target([*known, *tokens]))
        if wrong < count:
            tokens[wrong] = (tokens[wrong] + 1) % VOCABULARY
        self.accept(proposal(tuple(tokens), round=at.round + 1, base=at.committed, base_digest=at.digest))

    @rule(data=st.data())
    def propose_nonsense(self, data: st.DataObject) -> None:
        at = self.session.prefix.at
        self.accept(
            proposal(
                tuple(data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6))),
                round=data.draw(st.integers(0, at.round + 2)),
                base=data.draw(st.integers(0, at.committed + 1)),
                base_digest=data.draw(st.sampled_from([at.digest, bytes(32)])),
                epoch=data.draw(st.integers(0, 2)),
                drafter=data.draw(st.sampled_from([DRAFTER, OTHER_DRAFTER])),
            )
        )

    @precondition(lambda self: bool(self.sent))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        again = data.draw(st.sampled_from(self.sent))
        if data.draw(st.booleans()):
            again = msgspec.structs.replace(again, tokens=(0,))
        self.accept(again)

    @rule(load=LOADS)
    def self_decode(self, load: int) -> None:
        work = self.session.self_work(load, self.now)
        if work is not None:
            self.work = work

    @precondition(lambda self: self.work is not None)
    @rule(load=LOADS, finite=st.sampled_from([True] * 9 + [False]))
    def score(self, load: int, finite: bool) -> None:
        work, self.work = self.work, None
        assert work is not None
        if not finite:
            self.session.score_failed(work.ticket, "non-finite logits")
            return
        if self.session.wants(work.ticket):
            known = [*PROMPT, *self.session.prefix.output]
            pending = self.session.prefix.tip_pending
            if pending is not None:
                assert isinstance(pending.record, CommitRecord)
                known += pending.record.emitted
            assert work.start == len(known) - 1
            assert work.tokens[0] == known[-1]
        else:
            known = [0]
        prefix = [*known[:-1], *work.tokens]
        best = [target(prefix[: len(known) + place]) for place in range(len(work.tokens))]
        self.session.scored(work.ticket, best, load=load)

    @precondition(lambda self: self.session.to_append() is not None)
    @rule(fate=st.sampled_from(["answered"] * 6 + ["lost", "unanswered"]))
    def append(self, fate: str) -> None:
        append = self.session.to_append()
        assert append is not None
        fenced = view([entry for entry, _ in read_records(b"".join(self.log))]).fence > append.epoch
        if fenced:
            self.session.lost("fenced")
            return
        assert append.if_match == log_tag(self.log)
        if fate != "lost":
            self.log.append(append.octets)
        if fate == "answered":
            self.session.appended(log_tag(self.log), self.now)
        else:
            found = self.session.append_unknown(b"".join(self.log), self.now)
            assert isinstance(found, Settled) == (fate == "unanswered")

    @rule()
    def fence(self) -> None:
        if len(self.log) % 5 == 4:
            self.log.append(write_record(FenceRecord(epoch=2)))

    @rule(seconds=st.sampled_from([1.0, 5.0, 61.0]), load=LOADS)
    def wait(self, seconds: float, load: int) -> None:
        self.now += seconds
        self.session.expire(self.now, load)

    @rule(chance=st.integers(0, 9))
    def cancel(self, chance: int) -> None:
        if chance == 0:
            self.session.cancel("cancelled")

    @invariant()
    def the_output_is_durable_greedy_and_stable(self) -> None:
        if not hasattr(self, "session"):
            return
        output = self.session.prefix.output
        assert output[: len(self.visible)] == self.visible, "no index ever changes"
        self.visible = list(output)
        records = [entry for entry, _ in read_records(b"".join(self.log)) if isinstance(entry, CommitRecord)]
        logged = [token for record in records for token in record.emitted]
        assert logged[: len(output)] == output, "visible means durable"
        known = list(PROMPT)
        for token in output:
            assert token == target(known)
            known.append(token)
        assert len(output) <= self.contract.max_new
        assert not any(token in self.contract.stop for token in output[:-1])

    @invariant()
    def records_are_a_chain(self) -> None:
        if not hasattr(self, "session"):
            return
        digest = digests.prompt_digest(digests.contract_digest(self.contract), PROMPT)
        committed = 0
        entries = [entry for entry, _ in read_records(b"".join(self.log))]
        for place, record in enumerate(entry for entry in entries if isinstance(entry, CommitRecord)):
            digest = digests.extend(digest, record.emitted)
            committed += len(record.emitted)
            assert (record.round, record.committed, record.digest) == (place + 1, committed, digest)
            assert record.ctl
            if record.ctl.accepted is not msgspec.UNSET:
                assert record.ctl.accepted + 1 >= len(record.emitted)
            else:
                assert len(record.emitted) == 1
            assert record.ctl.action in Action

    @invariant()
    def the_end_is_said_once(self) -> None:
        if not hasattr(self, "session") or not self.session.closed:
            return
        page = self.session.output(len(self.session.prefix.output))
        assert page is not None
        assert page.final
        assert self.session.to_append() is None


OneSession.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOneSession = OneSession.TestCase
