"""What the checkers know of one session: its contract, its log as it is durable, the proposals that reached a verifier.

All that is recomputed here is written anew from the draft, calling nothing of sdcpd's own arithmetic: the digest chain,
the ladder, and which proposal a committed round can have come from.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

import cbor2
import msgspec
from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord, EndRecord, FenceRecord, Record
from sdcpd.protocol.messages import Contract, Proposal, SessionOpen
from sdcpd.protocol.terms import LadderAction
from tests.sim import oracle
from tests.sim.sampling_book import SPECULATIVE, SamplingBook, Wish

CONTINUE, FINISH, FAIL = 0, 4, 5
RESTORE_LOAD = 80
FIRST_EPOCH = 1
GREEDY = 1


class Wrong(Exception):
    """An invariant of design 5.5 does not hold."""


class Book:
    """One session."""

    def __init__(self, opened: SessionOpen, wish: Wish | None, again: Callable[[], bool]) -> None:
        """`again`: whether a profile that was replaced may come back (of two routers each has its own)."""
        assert not isinstance(opened.prompt, str)
        self.contract = opened.contract
        self.prompt = opened.prompt
        self.sampling = SamplingBook(opened.contract, opened.session, wish)
        self._again = again
        self._text: tuple[int, ...] = ()
        self.octets: list[bytes] = []  # of all records in the log, in order
        self.commits: list[CommitRecord] = []  # those that count
        self.output: list[int] = []
        self.fence = 0
        self.ended: EndRecord | None = None
        self.caps: frozenset[int] = frozenset({opened.contract.m_max})  # what m_cap may be now
        self.verdicts: dict[tuple[int, int], bytes] = {}
        self.proposals: dict[tuple[int, int], list[Proposal]] = {}
        self.servers: dict[int, str] = {}  # of each epoch, the verifier that opened the session or appended at it
        self.namings: dict[int, int] = {}  # of each epoch, the highest `seq` that was accepted
        self.namers: dict[int, int] = {}  # of each incarnation in a `seq`, the router process that used it
        self.rotted = False  # its log lost records to a flipped bit: then only what the target says can be checked
        self._digests = [_start(opened.contract, opened.prompt)]

    @property
    def expected(self) -> tuple[int, ...] | None:
        """The whole text, where it follows from the contract alone."""
        profile = self.sampling.fixed_text()
        if profile is None:
            return None
        if not self._text:
            self._text = oracle.output(self.prompt, self.contract.max_new, self.contract.stop, profile)
        return self._text

    @property
    def log(self) -> bytes:
        return b"".join(self.octets)

    @property
    def epoch(self) -> int:
        """The one at which the session may be served now."""
        return max(FIRST_EPOCH, self.fence)

    @property
    def closed(self) -> bool:
        """The log says that the session is over."""
        last = self.commits[-1] if self.commits else None
        by_round = last is not None and last.ctl is not UNSET and last.ctl.action in (FINISH, FAIL)
        return self.ended is not None or by_round

    def digest(self, committed: int) -> bytes:
        return self._digests[committed]

    def assigned(self, m_init: int) -> None:
        """A drafter was named. Whether it is another one than before, only the verifier knows (decision 42)."""
        self.caps |= {min(m_init, self.contract.m_max)}

    def served_by(self, verifier: str, epoch: int) -> None:
        """Decision 30: of one epoch there is one verifier. Raises Wrong."""
        if self.servers.setdefault(epoch, verifier) != verifier:
            raise Wrong(f"4: epoch {epoch} lives at {verifier} and at {self.servers[epoch]}")

    def named(self, epoch: int, seq: int) -> None:
        """Decision 111: an assignment is never overtaken by an older one. Raises Wrong."""
        if seq < self.namings.setdefault(epoch, seq):
            raise Wrong(f"4: seq {seq} was accepted after {self.namings[epoch]} at epoch {epoch}")
        self.namings[epoch] = seq

    def named_by(self, process: int, seq: int) -> None:
        """Decision 111: each life of a router that takes the session up has an incarnation of its own. Raises Wrong."""
        if self.namers.setdefault(seq >> 32, process) != process:
            raise Wrong(f"4: routers {self.namers[seq >> 32]} and {process} share incarnation {seq >> 32}")

    def rewind(self) -> None:
        """The log is gone, or shorter than it was: begin anew from what is read."""
        self.rotted = True
        self.octets, self.commits, self.output = [], [], []
        self.fence, self.ended = 0, None
        self.caps = frozenset(range(1, self.contract.m_max + 1))
        del self._digests[1:]

    def append(self, record: Record, octets: bytes) -> None:
        """A record became durable. Raises Wrong."""
        self.octets.append(octets)
        if record.epoch < self.fence:
            raise Wrong(f"4: a record of epoch {record.epoch} was appended behind a fence at {self.fence}")
        if isinstance(record, FenceRecord) and record.epoch <= self.epoch:
            raise Wrong(f"4: a fence at {record.epoch} in a log of epoch {self.epoch}")
        if not isinstance(record, FenceRecord) and record.epoch > self.epoch:
            raise Wrong(f"4: a record of epoch {record.epoch} without a fence at it")
        match record:
            case FenceRecord():
                self.fence = record.epoch
            case EndRecord():
                if self.closed:
                    raise Wrong("2: an end record in a log that is closed")
                self.ended = record
            case CommitRecord():
                self._commit(record)

    def _commit(self, record: CommitRecord) -> None:
        if self.closed:
            raise Wrong(f"2: round {record.round} was committed after the end")
        if record.round != len(self.commits) + 1:
            raise Wrong(f"2: round {record.round} follows round {len(self.commits)}")
        if record.committed != len(self.output) + len(record.emitted):
            raise Wrong(f"2: committed {record.committed} after {len(self.output)} and {len(record.emitted)} tokens")
        digest = self._digests[-1]
        for token in record.emitted:
            digest = hashlib.sha256(digest + struct.pack(">I", token)).digest()
            self._digests.append(digest)
        if record.digest != digest:
            raise Wrong(f"2: the digest of round {record.round} does not continue the chain")
        if not record.emitted or record.committed > self.contract.max_new:
            raise Wrong(f"7: {len(record.emitted)} tokens emitted, {record.committed} of {self.contract.max_new}")
        if any(token in self.contract.stop for token in (*self.output, *record.emitted[:-1])):
            raise Wrong("7: tokens after a stop token")
        if not self.rotted:
            fault = self.sampling.begins(record, again=self._again())
            if fault is not None:
                raise Wrong(fault)
        self._tokens(record)
        self._control(record)
        self.commits.append(record)
        self.output += record.emitted

    def _tokens(self, record: CommitRecord) -> None:
        """Item 10: greedy, replayable and seeded output is the oracle's, whatever happened."""
        place = len(self.output)
        if self.sampling.rule == GREEDY:
            known = oracle.output((*self.prompt, *self.output), len(record.emitted), self.contract.stop)
            if record.emitted != known:
                raise Wrong(f"10: round {record.round} commits other tokens than the target's at index {place}")
        elif not self.rotted:  # else it is not known any more under which profile
            fault = self.sampling.unfit((*self.prompt, *self.output), record)
            if fault is not None:
                raise Wrong(f"10: round {record.round}: {fault}")

    def _control(self, record: CommitRecord) -> None:
        """Items 7 and 9: some proposal of this round explains it, with the ladder's answer to it."""
        ctl, before = record.ctl, self.commits[-1].ctl if self.commits else UNSET
        if ctl is UNSET:
            raise Wrong(f"9: round {record.round} carries no ctl")
        c, g, j = (0, 0, 0) if before is UNSET else (before.c, before.g, before.j)
        finished = record.committed == self.contract.max_new or record.emitted[-1] in self.contract.stop
        if ctl.accepted is UNSET or ctl.m_cap is UNSET:
            told = (ctl.c, ctl.g, ctl.j, int(ctl.action), len(record.emitted))
            if told != (c, g, j, FINISH if finished else CONTINUE, 1):
                raise Wrong(f"9: self-decoded round {record.round} says {told} after {(c, g, j)}")
            fault = self.sampling.self_decoded((*self.prompt, *self.output), record) if self._weighs else None
            if fault is not None:
                raise Wrong(f"10: self-decoded round {record.round}: {fault}")
            return
        why = "no proposal of it reached the verifier"
        for proposal in self.proposals.get((record.epoch, record.round), ()):
            told_wrong = self._unexplained(record, ctl.accepted, proposal)
            if told_wrong is not None:
                why = told_wrong
                continue
            for cap in sorted(self.caps):
                if len(proposal.tokens) > cap:
                    why = f"7: {len(proposal.tokens)} tokens were scored under m_cap {cap}"
                    continue
                expected = self._ladder((c, g, j, cap), ctl.accepted, len(proposal.tokens), ctl.load, finished)
                if expected == (ctl.c, ctl.g, ctl.j, ctl.m_cap, int(ctl.action)) and ctl.low == ctl.c:
                    self.caps = frozenset({ctl.m_cap})
                    return
                why = f"9: ctl {ctl} where the ladder gives {expected} from {(c, g, j, cap)}"
        raise Wrong(f"7/9: nothing explains round {record.round}: {why}")

    def _unexplained(self, record: CommitRecord, accepted: int, proposal: Proposal) -> str | None:
        kept = min(accepted, len(record.emitted))
        if (proposal.base, proposal.base_digest) != (len(self.output), self._digests[len(self.output)]):
            return "its proposal had another base"
        if accepted > len(proposal.tokens) or len(record.emitted) > accepted + 1:
            return f"{accepted} accepted of {len(proposal.tokens)}, {len(record.emitted)} emitted"
        if record.emitted[:kept] != proposal.tokens[:kept]:
            return "it emits other tokens than those proposed"
        if max(proposal.tokens) >= oracle.VOCABULARY:
            return "its proposal had a token outside the vocabulary"
        if self._weighs:
            left = self.contract.max_new - len(self.output)
            return self.sampling.drafted((*self.prompt, *self.output), record, proposal, self.contract.stop, left)
        return None

    @property
    def _weighs(self) -> bool:
        return self.contract.rule == SPECULATIVE and not self.rotted

    def _ladder(
        self, at: tuple[int, int, int, int], a: int, m: int, load: int, finished: bool
    ) -> tuple[int, int, int, int, int]:
        """Draft 6.5.2 with decisions 74 to 78, from (c, g, j, m_cap)."""
        contract = self.contract
        c, g, j, cap = at
        ratio = 0 if contract.low_ratio is UNSET else contract.low_ratio
        if (100 * a < ratio * m) if ratio else (a == 0):
            c, g = c + 1, 0
        else:
            c, g = 0, g + 1
            if g >= contract.low_rounds:
                j = 0
            if load <= RESTORE_LOAD:
                cap = min(cap + 1, contract.m_max)
        if finished:
            return c, g, j, cap, FINISH
        if c < contract.low_rounds:
            return c, g, j, cap, CONTINUE
        for entry in contract.fallback[j:]:
            j += 1
            may = contract.self_load is not UNSET and load <= contract.self_load
            if entry is LadderAction.SELF_DECODE and not may:
                continue
            return 0, g, j, max(1, cap // 2) if entry is LadderAction.REDUCE else cap, int(entry)
        return 0, g, j, cap, FAIL


def _start(contract: Contract, prompt: Sequence[int]) -> bytes:
    """d[0] (4.1, 4.2)."""
    octets = cbor2.dumps(msgspec.to_builtins(contract, builtin_types=(bytes,)), canonical=True)
    digest = hashlib.sha256(b"SDCP-CONTRACT-1\x00" + octets).digest()
    tokens = struct.pack(f">{1 + len(prompt)}I", len(prompt), *prompt)
    return hashlib.sha256(b"SDCP-PREFIX-1\x00" + digest + tokens).digest()
