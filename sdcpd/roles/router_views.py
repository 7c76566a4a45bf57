"""What the router shows of itself to `sdcpctl` and the checkers: figures and names, never a token."""

from msgspec import Struct, UnsetType

from sdcpd.protocol.fleet import Instance
from sdcpd.protocol.placement_values import Phase
from sdcpd.protocol.terms import Action, session_path_id
from sdcpd.roles.session_task import SessionTask
from sdcpd.roles.traffic import ClassView


class RoutedSession(Struct, frozen=True, kw_only=True):
    """One session. `state`: opening, placing, drafting, self_decoding, waiting, recovering, ending; finished, failed or
    cancelled. `round` is the last the verifier told of; `drafter` is None while it decodes alone."""

    session: str
    model: str
    state: str
    epoch: int
    round: int
    prompt_tokens: int
    committed_tokens: int
    max_new: int
    verifier: str
    drafter: str | None
    speculation: bool
    age_s: float
    reason: str | None = None
    detail: str | None = None
    traffic_class: str | None = None


class KnownInstance(Struct, frozen=True, kw_only=True):
    """One instance as it last reported itself. `queue` as reported, `placed` by this router since then."""

    instance: str
    role: str
    load: int
    queue: int
    placed: int
    accept_milli: int | None
    age_ms: int
    ttl_ms: int
    expired: bool
    method: str | None
    model: str | None
    boot: str | None


class RouterSnapshot(Struct, frozen=True, kw_only=True):
    """All sessions in care and those that ended lately, all instances, and the traffic classes. `in_care` counts the
    first, those being closed included: what counts against `max_sessions`."""

    in_care: int
    sessions: tuple[RoutedSession, ...]
    instances: tuple[KnownInstance, ...]
    classes: tuple[ClassView, ...] = ()


def describe_session(task: SessionTask, now: float) -> RoutedSession:
    """One session as it stands now."""
    placement, plan = task.placement, task.placement.plan
    ending = placement.ending
    return RoutedSession(
        session=session_path_id(plan.session),
        model=task.model,
        state=state_of(task),
        epoch=placement.epoch,
        round=placement.round,
        prompt_tokens=len(plan.prompt),
        committed_tokens=len(placement.output),
        max_new=plan.contract.max_new,
        verifier=placement.verifier,
        drafter=placement.drafter,
        speculation=placement.speculates,
        traffic_class=plan.traffic_class or None,
        age_s=round(now - task.started_at, 3),
        reason=None if ending is None else ending.reason,
        detail=None if ending is None or not ending.detail else ending.detail,
    )


def state_of(task: SessionTask) -> str:
    """`state` of RoutedSession."""
    placement = task.placement
    ending = placement.ending
    if ending is not None:
        return "cancelled" if ending.cancelled else "finished" if ending.finish is Action.FINISH else "failed"
    match placement.phase:
        case Phase.OPENING | Phase.RECOVERING | Phase.ENDING:
            return str(placement.phase.value)
        case Phase.SETTLED:
            if placement.target is None:
                return "waiting"
            return "self_decoding" if placement.drafter is None else "drafting"
        case _:
            return "placing"


def describe_instance(one: Instance, now: float) -> KnownInstance:
    """One instance as the fleet knows it now."""
    status = one.status
    return KnownInstance(
        instance=one.uri,
        role=one.role.name.lower(),
        load=status.load,
        queue=status.queue,
        placed=one.placed,
        accept_milli=None if isinstance(status.accept_milli, UnsetType) else status.accept_milli,
        age_ms=round((now - one.received_at) * 1000),
        ttl_ms=status.ttl_ms,
        expired=one.expired or one.expires_at <= now,
        method=None if isinstance(status.method, UnsetType) else status.method,
        model=None if isinstance(status.model, UnsetType) else status.model.hex(),
        boot=None if one.boot is None else session_path_id(one.boot),
    )
