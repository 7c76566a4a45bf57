"""What the placement machine is given, wants done and is told: plain values (draft 5.1, 6.1; decisions 36, 37, 110).

An *action* is one call to make, with the number under which its *outcome* is to be reported back. The role makes the
call under the deadline it has for that kind and reports exactly one outcome, or none if the session ended meanwhile.
"""

from enum import Enum
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from sdcpd.protocol.messages import (
    Assignment,
    Contract,
    Output,
    Policy,
    Sampling,
    SessionOpen,
    SessionState,
    SpeculationStats,
)
from sdcpd.protocol.terms import Action

FIRST_EPOCH: Final = 1
"""Of every session at its first verifier (6.1); each attempt at another one takes a higher one (6.9, decision 30)."""


NO_ROOM: Final = 507
"""The store has no room."""


class Phase(Enum):
    """Where the main lane of a session stands; see placement.py."""

    OPENING = "opening"
    NAMING = "naming"
    GATHERING = "gathering"
    PUBLISHING = "publishing"
    ASSIGNING = "assigning"
    SETTLED = "settled"
    RECOVERING = "recovering"
    ENDING = "ending"
    ENDED = "ended"


class Plan(Struct, frozen=True, kw_only=True):
    """All that is fixed for one session when it is placed.

    `objects` is the base under which this session's objects are named, ending in `/` (cache part of the decisions).
    `verifier` is the first one; where the session lives later is the machine's to say. `incarnation` is the upper half
    of every `seq` (decision 111). `nonce` makes this router's fences (decision 85) and records its own.
    `record` is where the directory record goes (106), None for a session without one, and `model` the name a client
    used. `jitter` in [0.5, 1] stretches this session's backoffs, so that sessions which failed together do not retry
    together. `policy` is a profile that is for the verifier alone, in force from round 1 (decision 18). `logprobs`: how
    many likeliest tokens are told of with each token, None for no log-probabilities at all (decision 114). Drafters of
    `methods` are preferred, in this order; `traffic_class` is what an operator calls the session's kind. `prompt_ref`:
    where the prompt is published, None for one that goes within the messages; `prompt_renew_s`: how often it is written
    anew.
    """

    session: bytes
    contract: Contract
    prompt: tuple[int, ...]
    verifier: str
    verifier_boot: bytes | None
    vocabulary: int | None
    router: str
    commit_log: str
    objects: str
    m_init: int
    incarnation: Annotated[int, Meta(ge=0, lt=1 << 31)]
    speculation: bool
    nonce: str = ""
    record: str | None = None
    model: str = ""
    jitter: float = 1.0
    policy: Sampling | UnsetType = UNSET
    logprobs: int | None = None
    methods: tuple[str, ...] = ()
    traffic_class: str = ""
    prompt_ref: str | None = None
    prompt_renew_s: float = 200.0

    def tokens_ref(self, epoch: int, round_: int) -> str:
        """cache-ref of the tokens committed up to a round."""
        return f"{self.objects}{epoch}/{round_}/tokens"

    def opening(self, epoch: int, prompt: tuple[int, ...] | str) -> SessionOpen:
        """The session-open of 6.1, with the prompt or a reference to it."""
        return SessionOpen(
            session=self.session,
            epoch=epoch,
            contract=self.contract,
            prompt=prompt,
            commit_log=self.commit_log,
            router=self.router,
            logprobs=UNSET if self.logprobs is None else self.logprobs,
        )


class Patience(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often and how long the router retries (decision 36), `[router.patience]`.

    `open_give_up_s`     a session-open, from its first try: prefill of a long prompt under load fits in
    `name_give_up_s`     a PUT drafter that stays unanswered or is put off
    `gather_give_up_s`   the verifier states a length, and the output up to it does not come
    `read_give_up_s`     output unreadable although the verifier still reports itself alive
    `failover_give_up_s` the log unreachable, or no verifier to be found, while a session is taken from a lost one
    `close_give_up_s`    DELETE of a session; after that the verifier's own limits end it (decision 82)
    `tries`              of a call that another drafter can make up for: assignment, publishing its tokens, dropping it
    `first_retry_s`, `longest_retry_s`  backoff doubles from one to the other
    `drafter_rest_s`     a drafter that gave no answer, or the tokens of which could not be published, is let alone
    `poll_s`             how long an output poll may wait at the verifier (decision 38)
    """

    open_give_up_s: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    name_give_up_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    gather_give_up_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    read_give_up_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    failover_give_up_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    close_give_up_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    tries: Annotated[int, Meta(ge=1, le=20)] = 3
    first_retry_s: Annotated[float, Meta(gt=0, le=60)] = 0.1
    longest_retry_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    drafter_rest_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    poll_s: Annotated[float, Meta(gt=0, le=60)] = 20.0


class Call(Struct, frozen=True, kw_only=True):
    """Base of actions. `call` numbers the try: a repeat has the identical body and another number. 0: not sent yet."""

    call: int = 0


class Open(Call, frozen=True, kw_only=True):
    """POST sessions at the verifier."""

    verifier: str
    message: SessionOpen


class Name(Call, frozen=True, kw_only=True):
    """PUT sessions/{id}/drafter at the verifier; with the verifier's own URI as drafter: decode by yourself (110)."""

    verifier: str
    message: Assignment


class SetPolicy(Call, frozen=True, kw_only=True):
    """POST sessions/{id}/policy at the verifier (6.6)."""

    verifier: str
    message: Policy


class Publish(Call, frozen=True, kw_only=True):
    """Write a `committed_tokens` or `prompt` object (decision 25). One that is there already is the same: Accepted."""

    ref: str
    octets: bytes


class Assign(Call, frozen=True, kw_only=True):
    """POST assignments at the drafter."""

    message: Assignment


class Drop(Call, frozen=True, kw_only=True):
    """DELETE assignments/{session} at a drafter that is no longer wanted (decision 45)."""

    drafter: str
    session: bytes


class Read(Call, frozen=True, kw_only=True):
    """GET sessions/{id}/output?from=`start` at the verifier, waiting there up to `wait_s`."""

    verifier: str
    session: bytes
    start: int
    wait_s: float


class Close(Call, frozen=True, kw_only=True):
    """DELETE sessions/{id} at the verifier (decision 37)."""

    verifier: str
    session: bytes


class ReadLog(Call, frozen=True, kw_only=True):
    """Read a commit log: LogText, or Refused 404 where there is none."""

    ref: str


class WriteLog(Call, frozen=True, kw_only=True):
    """Append a fence or an end to a log that is at the tag `if_match`; None: create it with this record (86)."""

    ref: str
    record: bytes
    epoch: int
    if_match: str | None


class WriteRecord(Call, frozen=True, kw_only=True):
    """Make this the content of a directory record that is at the tag `if_match`, or not there (None): Stored."""

    ref: str
    octets: bytes
    if_match: str | None


class ReadRecord(Call, frozen=True, kw_only=True):
    """Read a directory record: RecordText."""

    ref: str


class AskState(Call, frozen=True, kw_only=True):
    """GET sessions/{id} at a verifier (decision 37)."""

    verifier: str
    session: bytes


PlacementAction = (
    Open
    | Name
    | SetPolicy
    | Publish
    | Assign
    | Drop
    | Read
    | Close
    | ReadLog
    | WriteLog
    | WriteRecord
    | ReadRecord
    | AskState
)


class Accepted(Struct, frozen=True):
    """Done as asked; there is no body."""


class Refused(Struct, frozen=True, kw_only=True):
    """The peer answered with a problem."""

    status: int
    suffix: str | None = None
    detail: str = ""
    retry_after_s: float | None = None
    state: SessionState | None = None


class Lost(Struct, frozen=True):
    """No answer within the deadline. The call may or may not have been carried out."""

    reason: str


class LogText(Struct, frozen=True):
    """All octets of a commit log."""

    octets: bytes


class RecordText(Struct, frozen=True):
    """The octets of a directory record, and its entity tag."""

    octets: bytes
    tag: str


class Stored(Struct, frozen=True):
    """The record is durable; `tag` is its new entity tag."""

    tag: str


Outcome = SessionState | Output | LogText | RecordText | Stored | Accepted | Refused | Lost
"""SessionState answers Open, Name, SetPolicy and AskState, Output answers Read, LogText ReadLog, RecordText ReadRecord,
Stored WriteRecord, Accepted the rest."""


class Ending(Struct, frozen=True, kw_only=True):
    """How a session ended, seen from here.

    `finish` is FINISH or FAIL. `reason` of a FAIL is a code of ours, or the verifier's own words where it ended the
    session; `detail` has more for the operator. `cancelled`: the client left, counted apart from failures (decision
    37). `gone`: the verifier holds nothing that would still have to be closed.
    """

    finish: Action
    reason: str | None = None
    detail: str = ""
    cancelled: bool = False
    gone: bool = False
    stats: SpeculationStats | None = None


class Moved(Struct, frozen=True):
    """The session was given to somebody else, to the same one again, or (`to` None) to nobody for now.

    `reason` is a label of `reassignments_total`.
    """

    reason: str
    to: str | None


class FailingOver(Struct, frozen=True):
    """The session is being taken from its verifier. `kind` says why, and is a label of `failover_total`."""

    kind: str
    verifier: str
    epoch: int


def passing(outcome: Outcome) -> bool:
    """Whether trying again may help: no answer, or a 5xx (decision 36)."""
    return isinstance(outcome, Lost) or (isinstance(outcome, Refused) and outcome.status >= 500)


def retry_after_s(outcome: Outcome) -> float | None:
    """How long the peer asked us to wait, if it did."""
    return outcome.retry_after_s if isinstance(outcome, Refused) and passing(outcome) else None


def words(outcome: Outcome) -> str:
    """An outcome that was not hoped for, for a reason text."""
    match outcome:
        case Refused(status=status, suffix=suffix, detail=detail):
            return " ".join(part for part in (str(status), suffix, detail) if part)
        case Lost(reason=reason):
            return f"no answer ({reason})"
        case _:
            return f"answered with {type(outcome).__name__}"
