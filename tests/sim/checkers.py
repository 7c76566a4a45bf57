"""The invariants of design 5.5, fed by taps on the ports: what was made durable, what was answered, what a reader saw.

Numbers in the messages are those of 5.5, and a decision's where that says it. README.md lists which check is where.
The checkers hold the only other copy of each log; at every restart of its cache the log is compared with it.
"""

import contextlib
from collections.abc import Callable

import trio

from sdcpd.cache.journal import Written
from sdcpd.cache.log_requests import AppendToLog, CreateLog, LogAppended, ReplaceRecord
from sdcpd.cache.log_store import Batch, LogStore
from sdcpd.cache.refs import LogName, ObjectName, RecordName, parse_path
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.commit_log import CommitRecord, read_records
from sdcpd.protocol.encoding import decode
from sdcpd.protocol.messages import Assignment, Output, Policy, Proposal, SessionOpen, SessionState, Verdict
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.ports import Peer
from tests.sim.injector import Injector
from tests.sim.row_checks import RowChecks
from tests.sim.sampling_book import Wish
from tests.sim.session_book import Book, Wrong
from tests.sim.sim_node import Incarnation


class Checkers:
    """`wrong` is told of the first thing that does not hold; `rot` says whether a bit of the journal has flipped."""

    def __init__(self, wrong: Callable[[str], None], inject: Injector) -> None:
        self.books: dict[bytes, Book] = {}
        self.asked: dict[bytes, Wish] = {}  # all sessions that clients were told of, in that order
        self.rows = RowChecks(wrong, lambda: not inject.injected)
        self.rounds = 0
        self._wrong = wrong
        self._inject = inject
        self._answered: dict[tuple[str, int, bytes], int] = {}  # the highest epoch that an incarnation answered at
        self._recorded: dict[bytes, float] = {}
        self._early: dict[bytes, bytes] = {}  # logs begun by a router's fence, before any verifier saw the session
        self._fenced: dict[
            tuple[str, int, bytes], tuple[float, int]
        ] = {}  # since when an incarnation knows, and below what

    # The log

    def worked(self, function: Callable[..., object], args: tuple[object, ...], result: object) -> None:
        """A blocking call of a cache node has returned: what a batch wrote is durable from here on."""
        if getattr(function, "__func__", None) is not LogStore.write_batch or not isinstance(result, Written):
            return
        (batch,) = args
        assert isinstance(batch, Batch)
        for request, outcome in zip(batch.requests, batch.outcomes, strict=True):
            if isinstance(outcome, LogAppended) and isinstance(request, CreateLog | AppendToLog):
                session = _session(request.name)
                if isinstance(request, CreateLog):
                    self._begun(session)
                self._durable(session, b"".join(record.octets for record in request.records))
            elif isinstance(outcome, LogAppended) and isinstance(request, ReplaceRecord):
                name = parse_path(request.name)
                assert isinstance(name, RecordName)
                self._recorded.setdefault(name.session, trio.current_time())

    def recorded_at(self, session: bytes) -> float | None:
        """Since when the directory holds the session: a router that starts then must know of it (106)."""
        return self._recorded.get(session)

    def recovered(self, session: bytes, octets: bytes) -> None:
        """A cache came back with this log: it must hold all that was acknowledged, and may hold what was not."""
        book = self.books.get(session)
        if book is None:
            self._early[session] = octets
            return
        if self._inject.any("bit_rot") and book.log.startswith(octets) and book.log != octets:
            book.rewind()  # a flipped bit at the end of the journal looks like the torn end of a crash
        if not octets.startswith(book.log):
            self._wrong(f"1: {session_path_id(session)}: a restarted cache lost acknowledged records")
            return
        self._durable(session, octets[len(book.log) :])

    def gone(self, session: bytes) -> None:
        """A cache came back without this log, or cannot read it."""
        book = self.books.get(session)
        if book is None:
            self._early.pop(session, None)
        elif self._inject.any("bit_rot"):
            book.rewind()
        elif book.octets:
            self._wrong(f"1: {session_path_id(session)}: its log is gone or damaged")

    def _begun(self, session: bytes) -> None:
        self._early.pop(session, None)
        if session in self.books and self.books[session].octets:
            self.gone(session)

    def _durable(self, session: bytes, octets: bytes) -> None:
        book = self.books.get(session)
        if book is None:
            self._early[session] = self._early.get(session, b"") + octets
            return
        for record, raw in read_records(octets):
            self.rounds += isinstance(record, CommitRecord)
            self._checked(session, lambda record=record, raw=raw: book.append(record, raw))  # type: ignore[misc]

    # Messages

    def _again(self) -> bool:
        return self._inject.any("router_doubled")

    def asked_to_draft(self, request: Request) -> None:
        """A request reached a drafter."""
        if (request.method, request.path) == ("POST", "assignments"):
            self.rows.assigned(decode(request.body, Assignment))

    def arrived(self, peer: Peer, request: Request) -> None:
        """A request reached a verifier."""
        try:
            match request.method, request.path.split("/"):
                case "POST", ["sessions"]:
                    opened = decode(request.body, SessionOpen)
                    if opened.session not in self.books:
                        self.books[opened.session] = Book(opened, self.asked.get(opened.session), self._again)
                        self._durable(opened.session, self._early.pop(opened.session, b""))
                case "POST", ["proposals"]:
                    proposal = decode(request.body, Proposal)
                    book = self.books.get(proposal.session)
                    if book is not None and proposal.drafter == peer.uri:
                        self.rows.proposed(proposal)
                        book.proposals.setdefault((proposal.epoch, proposal.round), []).append(proposal)
                case _:
                    pass
        except Problem:
            pass  # a rogue's octets; the verifier refuses them by the same decoder

    def served(self, node: Incarnation, role: str, peer: Peer, request: Request, response: Response) -> None:
        """A handler has answered."""
        path = request.path.split("/")
        if role == "verifier" and path == ["proposals"]:
            self._answered_to(request)
        if response.status >= 300:
            return
        if role == "cache":
            self.rows.cached(request, response)
            if path[0] == "leases":
                pass
            elif path[-2] == "l" and request.method == "GET":
                self._log_read(_session(request.path), response.body)
            elif path[-2] == "l" and peer.role == "verifier":
                name, epoch = peer.uri.split("/")[2].split(".")[0], int(request.headers["kvsp-epoch"])
                self._book_checked(_session(request.path), lambda book: book.served_by(name, epoch))
            return
        if role != "verifier":
            return
        match request.method, path:
            case "POST", ["proposals"]:
                self._verdict(node, decode(request.body, Proposal), response.body)
            case "POST", ["sessions", _, "policy"]:
                policy, state = decode(request.body, Policy), decode(response.body, SessionState)
                self.books[state.session].sampling.accepted(state.epoch, policy)
            case "GET", ["sessions", _, "output"]:
                self._output(node, decode(response.body, Output))
            case "PUT", ["sessions", _, "drafter"]:
                assignment = decode(request.body, Assignment)
                if assignment.drafter != assignment.verifier:
                    self.books[assignment.session].assigned(assignment.m_init)
                self._named(assignment)
                self._state(node, decode(response.body, SessionState))
            case "POST", ["sessions"]:
                state = decode(response.body, SessionState)
                self._book_checked(state.session, lambda book: book.served_by(node.name, state.epoch))
                self._state(node, state)
            case "GET", ["sessions", _]:
                self._state(node, decode(response.body, SessionState))
            case _:
                pass

    def heard(self, node: Incarnation, request: Request, response: Response) -> None:
        """A caller has its answer: a verifier that is told of a fence stops serving the session (6.8, decision 65)."""
        if request.method == "PATCH" and response.status == 409 and b"sdcp-stale-epoch" in response.body:
            epoch = int(request.headers["kvsp-epoch"])
            self._fenced.setdefault((node.name, node.number, _session(request.path)), (trio.current_time(), epoch))

        if request.method == "PUT" and request.path.endswith("/drafter"):
            assignment = decode(request.body, Assignment)
            seq = assignment.seq
            assert isinstance(seq, int), "our routers always send it"
            self._book_checked(assignment.session, lambda book: book.named_by(node.number, seq))
        path = request.path.split("?")[0]
        if request.method == "GET" and path.endswith("/q") and response.status == 200:
            name = parse_path(path)
            assert isinstance(name, ObjectName)
            if name.session in self.books:
                self.books[name.session].sampling.rows.setdefault(path, []).append(response.body)

    def _answered_to(self, request: Request) -> None:
        with contextlib.suppress(Problem):  # a rogue's octets
            self.rows.answered(decode(request.body, Proposal))

    def _named(self, assignment: Assignment) -> None:
        seq = assignment.seq
        assert isinstance(seq, int), "our routers always send it"
        self._book_checked(assignment.session, lambda book: book.named(assignment.epoch, seq))

    def _log_read(self, session: bytes, octets: bytes) -> None:
        book = self.books.get(session)
        if book is not None and not book.rotted and not book.log.startswith(octets):
            self._wrong(f"1: {session_path_id(session)}: a read log is not what was appended")

    def _verdict(self, node: Incarnation, proposal: Proposal, octets: bytes) -> None:
        verdict = decode(octets, Verdict)
        book = self.books[verdict.session]
        self._serves(node, verdict.session, verdict.epoch)

        def check() -> None:
            if proposal.epoch != verdict.epoch:
                raise Wrong(f"4: a proposal of epoch {proposal.epoch} got a verdict of epoch {verdict.epoch}")
            if book.rotted:
                return
            if not 1 <= verdict.round <= len(book.commits):
                raise Wrong(f"3: a verdict of round {verdict.round} before its record")
            record = book.commits[verdict.round - 1]
            same = (verdict.emitted, verdict.committed, verdict.digest) == (
                record.emitted,
                record.committed,
                record.digest,
            )
            if not same or verdict.round != proposal.round:
                raise Wrong(f"1: the verdict of round {verdict.round} is not what its record says")
            if book.verdicts.setdefault((verdict.epoch, verdict.round), octets) != octets:
                raise Wrong(f"5: round {verdict.round} was answered by another verdict before")

        self._checked(verdict.session, check)

    def _output(self, node: Incarnation, page: Output) -> None:
        self._serves(node, page.session, page.epoch)
        self.page("3", page)

    def page(self, item: str, page: Output) -> None:
        """Output as somebody is about to see it: each token's record is in the log."""
        book = self.books[page.session]
        known = book.expected if book.rotted else book.output
        if known is None:
            return  # of a text that followed from draws and drafts, the log was the only witness
        shown = tuple(known[page.from_ : page.from_ + len(page.tokens)])
        if shown != page.tokens:
            self._wrong(f"{item}: {session_path_id(page.session)}: output at {page.from_} is not in the log")
        elif page.epoch > book.epoch and not book.rotted:
            self._wrong(
                f"{item}: {session_path_id(page.session)}: output of epoch {page.epoch}, the log is at {book.epoch}"
            )
        elif page.final and page.finish == 4 and not book.closed and not book.rotted:
            self._wrong(f"3: {session_path_id(page.session)}: a final page before the log says so")

    def _state(self, node: Incarnation, state: SessionState) -> None:
        book = self.books[state.session]
        self._serves(node, state.session, state.epoch)
        if book.rotted:
            return
        committed = book.commits[state.round - 1].committed if 0 < state.round <= len(book.commits) else 0
        if state.committed != committed or state.digest != book.digest(committed):
            self._wrong(f"3: {session_path_id(state.session)}: session-state of round {state.round} is not in the log")

    def _serves(self, node: Incarnation, session: bytes, epoch: int) -> None:
        highest = self._answered.setdefault((node.name, node.number, session), epoch)
        if epoch < highest:
            self._wrong(
                f"4: {node.name} answers at epoch {epoch} for {session_path_id(session)}, which it has at {highest}"
            )
        self._answered[node.name, node.number, session] = max(epoch, highest)
        since, lost = self._fenced.get((node.name, node.number, session), (trio.current_time(), -1))
        if since < trio.current_time() and epoch <= lost:
            self._wrong(f"4: {node.name} answers for {session_path_id(session)}, which it lost")

    def _book_checked(self, session: bytes, check: Callable[[Book], None]) -> None:
        book = self.books.get(session)
        if book is not None and not book.rotted:
            self._checked(session, lambda: check(book))

    def _checked(self, session: bytes, check: Callable[[], None]) -> None:
        try:
            check()
        except Wrong as wrong:
            self._wrong(f"{wrong} ({session_path_id(session)})")


class Reader:
    """Item 6: what one client sees of its session, and whether it is what a reader may see."""

    def __init__(self, checkers: Checkers, wrong: Callable[[str], None]) -> None:
        self.tokens: list[int] = []
        self._checkers = checkers
        self._wrong = wrong
        self.epoch = 0

    def page(self, page: Output) -> None:
        if page.from_ != len(self.tokens):
            self._wrong(f"6: a reader with {len(self.tokens)} tokens got a page from {page.from_}")
        if page.epoch < self.epoch:
            self._wrong(f"6: a reader saw epoch {page.epoch} after {self.epoch}")
        if page.tokens or page.finish == 4:
            self._checkers.page("6", page)
        self.epoch = page.epoch
        self.tokens += page.tokens


def _session(path: str) -> bytes:
    name = parse_path(path)
    assert isinstance(name, LogName)
    return name.session
