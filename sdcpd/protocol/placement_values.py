"""What the placement machine is given, wants done and is told: plain values (draft 5.1, 6.1; decisions 36, 37, 110).

An *action* is one call to make, with the number under which its *outcome* is to be reported back. The role makes the
call under the deadline it has for that kind and reports exactly one outcome, or none if the session ended meanwhile.
"""

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
"""The only epoch until failover is built (6.9)."""


class Plan(Struct, frozen=True, kw_only=True):
    """All that is fixed for one session when it is placed.

    `objects` is the base under which this session's objects are named, ending in `/` (cache part of the decisions).
    `incarnation` is the upper half of every `seq` (decision 111). `jitter` in [0.5, 1] stretches this session's
    backoffs, so that sessions which failed together do not retry together. `policy` is a profile that is for the
    verifier alone, in force from round 1 (decision 18).
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
    jitter: float = 1.0
    policy: Sampling | UnsetType = UNSET

    def tokens_ref(self, epoch: int, round_: int) -> str:
        """cache-ref of the tokens committed up to a round."""
        return f"{self.objects}{epoch}/{round_}/tokens"

    def opening(self, epoch: int) -> SessionOpen:
        """The session-open of 6.1."""
        return SessionOpen(
            session=self.session,
            epoch=epoch,
            contract=self.contract,
            prompt=self.prompt,
            commit_log=self.commit_log,
            router=self.router,
        )


class Patience(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often and how long the router retries (decision 36), `[router.patience]`.

    `open_give_up_s`     a session-open, from its first try: prefill of a long prompt under load fits in
    `name_give_up_s`     a PUT drafter that stays unanswered or is put off
    `gather_give_up_s`   the verifier states a length, and the output up to it does not come
    `read_give_up_s`     output unreadable although the verifier still reports itself alive
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
    """Write a `committed_tokens` object (decision 25). An object that is already there is the same one: Accepted."""

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


PlacementAction = Open | Name | SetPolicy | Publish | Assign | Drop | Read | Close


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


Outcome = SessionState | Output | Accepted | Refused | Lost
"""SessionState answers Open, Name and SetPolicy, Output answers Read, Accepted the rest."""


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
