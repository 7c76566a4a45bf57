"""One session at its verifier, played by hand: the machine, a log that keeps the rules of 6.8, and a clock.

Who drives says what the target finds most probable (`best`) and what becomes of each append. The digest chain is
computed beside the machine, from the draft's formula alone.
"""

import struct
from hashlib import sha256
from typing import Any

from sdcpd.protocol.commit_log import FenceRecord, Record, log_tag, read_records, write_record
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.messages import Event, Output, Proposal, SessionState, Verdict
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Append, Begin, Busy, Join, Replay, SessionLimits, Settled, Stopped, Work
from tests.support.messages import DRAFTER, SESSION, VERIFIER, assignment, contract, proposal, session_open

PROMPT = (1, 1, 1)
VOCABULARY = 100


def chain(of: Any, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[bytes]:
    """d[0] to d[n], by the formulas of 4.1 and 4.2."""
    contract_digest = sha256(b"SDCP-CONTRACT-1" + b"\x00" + encode(of)).digest()
    octets = b"".join(struct.pack(">I", token) for token in (len(prompt), *prompt))
    found = [sha256(b"SDCP-PREFIX-1" + b"\x00" + contract_digest + octets).digest()]
    for token in output:
        found.append(sha256(found[-1] + struct.pack(">I", token)).digest())
    return found


class Verifying:
    """A session with the contract members given; nobody is assigned yet."""

    def __init__(self, *, vocabulary: int = VOCABULARY, limits: SessionLimits | None = None, **members: Any) -> None:
        self.contract = contract(**members)
        self.now = 0.0
        self.log: list[bytes] = []
        self.seq = 0
        self.work: Work | None = None
        self.sent: dict[int, Proposal] = {}
        self.session = Session(
            session_open(contract=self.contract, prompt=PROMPT),
            instance=VERIFIER,
            prompt=PROMPT,
            vocabulary=vocabulary,
            limits=limits if limits is not None else SessionLimits(),
            log_tag=log_tag(()),
            now=self.now,
        )

    # What it says

    @property
    def state(self) -> SessionState:
        return self.session.session_state()

    @property
    def output(self) -> tuple[int, ...]:
        """All committed tokens that may be seen."""
        page = self.session.output(0)
        return page.tokens if page is not None else ()

    def page(self, from_: int = 0) -> Output:
        page = self.session.output(from_)
        assert page is not None, "the caller would wait"
        return page

    def digest(self, committed: int | None = None) -> bytes:
        """d[committed] of what is visible, by the formula."""
        return chain(self.contract, PROMPT, self.output)[-1 if committed is None else committed]

    @property
    def records(self) -> list[Record]:
        """The log's content."""
        return [record for record, _ in read_records(b"".join(self.log))]

    def events(self) -> list[Event]:
        return self.session.take_events()

    # What is done to it

    def assign(self, drafter: str = DRAFTER, **members: Any) -> SessionState | Busy:
        """PUT drafter with the next seq, unless one is given."""
        self.seq = members.pop("seq", self.seq + 1)
        message = assignment(contract=self.contract, drafter=drafter, seq=self.seq, **members)
        return self.session.assign(message, self.now)

    def next_proposal(self, *tokens: int, **members: Any) -> Proposal:
        """A proposal that extends the committed prefix, but for the members given."""
        at = self.state
        right = {"session": SESSION, "round": at.round + 1, "base": at.committed, "base_digest": at.digest}
        return proposal(tokens, **(right | members))

    def propose(self, *tokens: int, peer: str = DRAFTER, **members: Any) -> Replay | Join | Begin:
        return self.submit(self.next_proposal(*tokens, **members), peer)

    def submit(self, sent: Proposal, peer: str = DRAFTER) -> Replay | Join | Begin:
        answer = self.session.propose(peer, sent, self.now)
        if isinstance(answer, Begin):
            self.work = answer.work
            self.sent[sent.round] = sent
        return answer

    def self_work(self, load: int = 0) -> Work | None:
        """The next token the verifier would decode by itself."""
        work = self.session.self_work(load, self.now)
        if work is not None:
            self.work = work
        return work

    def score(self, *best: int, load: int = 0) -> bool:
        """The pass is done: argmax p[1..M+1] of the work under way (more than needed are left over)."""
        assert self.work is not None, "nothing is being scored"
        return self.session.scored(self.work.ticket, best[: len(self.work.tokens)], load=load)

    def append(self, fate: str = "answered") -> Settled | Append | Stopped | None:
        """Append what waits, with this fate: "answered", "unanswered" (written), "lost" (not written), or "overtaken"
        (written and unanswered, and fenced before anybody looks).

        A fence makes the store refuse, which is settled by reading the log. None when nothing waits.
        """
        append = self.session.to_append()
        if append is None:
            return None
        fences = [record.epoch for record in self.records if isinstance(record, FenceRecord)]
        refused = append.if_match != log_tag(self.log) or max(fences, default=0) > append.epoch
        if fate != "lost" and not refused:
            self.log.append(append.octets)
        if fate == "overtaken":
            self.fence()
        if fate == "answered" and not refused:
            return self.session.appended(log_tag(self.log), self.now)
        return self.session.append_unknown(b"".join(self.log), self.now)

    def fence(self, epoch: int = 2) -> None:
        """A router appends a fence record."""
        self.log.append(write_record(FenceRecord(epoch=epoch, by="https://r.example/router/ 1")))

    def wait(self, seconds: float, load: int = 0) -> None:
        self.now += seconds
        self.session.expire(self.now, load)

    # Whole rounds

    def round(self, tokens: tuple[int, ...], best: tuple[int, ...], load: int = 0) -> Verdict:
        """Propose, score, append, answer."""
        sent = self.next_proposal(*tokens)
        assert isinstance(self.submit(sent), Begin)
        assert self.score(*best, load=load)
        self.append()
        verdict = self.session.awaited(sent.round)
        assert verdict is not None
        return verdict

    def good(self, count: int = 1) -> Verdict:
        """A round in which `count` tokens are proposed and all are right: tokens 20, 20, ..."""
        return self.round((20,) * count, (20,) * (count + 1))

    def low(self, count: int = 1, load: int = 0) -> Verdict:
        """A round in which `count` tokens are proposed and the first is wrong: one token 20 is committed."""
        return self.round((30,) * count, (20,) * (count + 1), load)

    def self_token(self, token: int = 40, load: int = 0) -> bool:
        """One self-decoded round; False when none is to be made."""
        if self.self_work(load) is None:
            return False
        assert self.score(token, load=load)
        self.append()
        return True
