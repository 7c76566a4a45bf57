"""The router role: takes prompts, places each as a session, watches the fleet (draft 6.1, 6.7, 6.9).

Three sources move it: clients (through `generation`), instances (status and events), and time (one task that looks at
the fleet several times within the shortest ttl). Everything about one session is in its SessionTask and, below that,
in its placement machine; here sessions are admitted, found and remembered.

Sessions outlive the router: each has a record in the directory, and a router that starts takes up those that are its
own (106). They belong to whoever reads their output here (84) until their end; unread for a while, they are cancelled.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import structlog
import trio
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from sdcpd.cache.refs import ObjectKind, log_reference, object_reference, record_reference
from sdcpd.drafting.traffic_class import TrafficClass
from sdcpd.protocol.fleet import Fleet, Instance, VerifierNeed
from sdcpd.protocol.ladder import Ladder, contract_members, named
from sdcpd.protocol.messages import Contract, Event, Output, Sampling, Status
from sdcpd.protocol.placement import Placement
from sdcpd.protocol.placement_values import FIRST_EPOCH, Plan
from sdcpd.protocol.problems import Forbidden, IllFormed, Overloaded, SessionClosed, StaleEpoch, UnknownResource
from sdcpd.protocol.terms import InstanceRole, Rule, session_path_id
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.adoption import Claimed, claim_sessions
from sdcpd.roles.ended_output import Ended, ended_page
from sdcpd.roles.generation import (
    Generation,
    GenerationRefused,
    GenerationRequest,
    ModelCard,
)
from sdcpd.roles.lost_prompt import end_without_prompt
from sdcpd.roles.ports import Peer, Ports
from sdcpd.roles.request_fit import check_tokens, context_of, first_fit, vocabulary_of
from sdcpd.roles.router_commands import RouterCommands
from sdcpd.roles.router_settings import RoutedModel, RouterSettings
from sdcpd.roles.router_views import RouterSnapshot, describe_instance, describe_session, state_of
from sdcpd.roles.sampling_terms import check_sampling, contract_sampling, rule_of, verifier_policy
from sdcpd.roles.session_task import PAGE_TOKENS, SessionTask
from sdcpd.roles.traffic import Traffic
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)


FORGOTTEN_IDS = 4096
"""Ids of sessions ended long ago, remembered only to answer 410 rather than 404; 16 octets each."""

LONGEST_LIFE_S = 600.0
"""Of a prompt's object, as far as its renewals are concerned (cache part 5.4): caches may cut a longer one."""

FIRST_INCARNATION = 1
"""Of every session at its first router (decision 111); each that takes it up raises it in the directory."""


class Router:
    """Places sessions. `instance` is this role's base URI, `cache` that of the cache role which holds its logs.

    Raises LadderError when a ladder that is named does not exist. Two models must not share a name.
    """

    def __init__(
        self,
        settings: RouterSettings,
        ports: Ports,
        *,
        instance: str,
        cache: str,
        models: tuple[RoutedModel, ...],
        ladders: Mapping[str, Ladder],
        classes: Sequence[TrafficClass] = (),
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._instance = normalize_base_uri(instance)
        self._cache = normalize_base_uri(cache)
        self._models = {model.name: model for model in models}
        assert len(self._models) == len(models), "two models share a name"
        self._ladders: dict[str, Ladder] = {}
        self._traffic = Traffic((), {}, ports.meters, ports.randomness.stream("class shares"))
        self.take_ladders(ladders, settings.default_ladder, classes=classes)
        self._fleet = Fleet(settings.max_instances, settings.affinity)
        self._sessions: OrderedDict[bytes, SessionTask] = OrderedDict()
        self._ended: OrderedDict[bytes, Ended] = OrderedDict()
        self._ids = ports.randomness.stream("session ids")
        self._nonces = ports.randomness.stream("fence nonces")
        self._jitter = ports.randomness.stream("retry jitter")
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self._directory_read = False
        self._nursery: trio.Nursery | None = None
        self.commands = RouterCommands(
            self._sessions, self._fleet, ports, instance=self._instance, cache=self._cache, state_of=state_of
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Sessions go on at their verifiers, until a router takes them up or 82 ends them."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                log.info("router ready", instance=self._instance, models=len(self._models))
                nursery.start_soon(self._adopt_sessions)
                task_status.started()
                await self._watch_fleet()
        finally:
            self._nursery = None

    def take_ladders(
        self,
        ladders: Mapping[str, Ladder],
        default: str,
        by_model: Mapping[str, str | None] | None = None,
        *,
        classes: Sequence[TrafficClass] = (),
    ) -> None:
        """From now on new sessions fall in these classes and escalate by these ladders; a session's contract never
        changes (4.1).

        `by_model`: the ladder that each model names now, None for the default; without it as at the start. Raises
        LadderError, and keeps the old ones, when a ladder that is named does not exist.
        """
        chosen = {name: model.ladder for name, model in self._models.items()}
        chosen |= {name: ladder for name, ladder in (by_model or {}).items() if name in chosen}
        taken = {
            name: named(ladders, default, "router.default_ladder")
            if ladder is None
            else named(ladders, ladder, f"models.{name}.ladder")
            for name, ladder in chosen.items()
        }
        self._traffic.take(classes, ladders)
        self._ladders = taken

    # What peers call (Table 1)

    async def report_status(self, peer: Peer, instance: str, message: Status) -> None:
        """PUT instances/{id}/status. An instance speaks for itself only (decisions 31, 33)."""
        try:
            uri, named_uri = normalize_base_uri(message.instance), normalize_base_uri(instance)
        except ValueError as error:
            raise IllFormed(f"status.instance: {error}") from error
        if uri != named_uri:
            raise IllFormed("status.instance is not the instance named in the path")
        role = InstanceRole(message.role).name.lower()
        if peer.role != role or peer.uri != uri:
            raise Forbidden(f"only the {role} {uri} may report its status")
        status = replace(message, instance=uri)
        report = self._fleet.report(status, self._ports.clock.now())
        if report.fresh or report.rebooted:
            log.info("instance reports", instance=uri, role=role, rebooted=report.rebooted)
        if report.fresh or report.rebooted or not isinstance(status.declined, UnsetType):
            self._look()

    async def report_event(self, peer: Peer, message: Event) -> None:
        """POST events: 204 also for what changes nothing; 404 unknown session, 409 another epoch (decision 49)."""
        task = self._sessions.get(message.session)
        ended = self._ended.get(message.session)
        if task is not None:
            verifier, epoch = task.placement.verifier, task.placement.epoch
        elif ended is not None:
            verifier, epoch = ended.view.verifier, ended.view.epoch
        else:
            raise UnknownResource("no such session at this router")
        if peer.role == "verifier" and message.epoch < epoch:
            raise StaleEpoch(f"the session is at epoch {epoch}")  # the sender may be one it was taken from
        if peer.role != "verifier" or peer.uri != verifier:
            raise Forbidden("events of a session come from its verifier")
        log.debug(
            "event",
            session=session_path_id(message.session),
            epoch=message.epoch,
            round=None if isinstance(message.round, UnsetType) else message.round,
            kind=message.kind.name.lower(),
        )
        if task is not None:
            task.event(message)
        elif ended is not None and message.epoch != ended.view.epoch:
            raise StaleEpoch(f"the session ended at epoch {ended.view.epoch}")

    async def read_output(self, peer: Peer, session: bytes, from_: int, wait_s: float) -> Output:
        """GET sessions/{id}/output?from=n, wherever the session lives or lived (decisions 39, 84, 106)."""
        task = self._sessions.get(session)
        if task is not None:
            if sum(one.readers for one in self._sessions.values()) >= self._settings.max_readers:
                raise Overloaded("too many readers wait at this router", retry_after_s=1)
            return await task.read(from_, wait_s)
        ended = self._ended.get(session)
        if ended is not None:
            return await ended_page(self._ports, ended.commit_log, session, ended.view, from_, wait_s, PAGE_TOKENS)
        if session in self._forgotten:
            raise SessionClosed("the session ended long ago; its output is in its commit log")
        if not self._directory_read:
            raise Overloaded("this router is still finding its sessions", retry_after_s=1)
        raise UnknownResource("no such session at this router")

    # What the front end asks (roles/generation.py)

    def models(self) -> tuple[ModelCard, ...]:
        """All configured models. Context and vocabulary are the largest reported, of live verifiers if there are."""
        now = self._ports.clock.now()
        return tuple(self._card(model, now) for model in self._models.values())

    def ready(self) -> tuple[bool, str]:
        """Whether some model could be served now, and in words why not."""
        if self._nursery is None:
            return False, "the router is not running"
        cards = self.models()
        if not cards:
            return False, "no model is configured"
        if not any(card.ready for card in cards):
            return False, f"no verifier reports itself ready for {', '.join(card.name for card in cards)}"
        return True, ""

    def generation(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """One session for the length of the block. Entering raises GenerationRefused; leaving early cancels it."""
        return _Block(self, request)

    def admit(self, request: GenerationRequest) -> SessionTask:
        """Check a request against what could serve it, and start its session. Raises GenerationRefused."""
        model = self._models.get(request.model)
        if model is None:
            raise GenerationRefused("unknown_model", f"there is no model {request.model[:256]!r}", param="model")
        check_tokens(request)
        check_sampling(request)
        now = self._ports.clock.now()
        need = _need(model, rule_of(request), self._settings.affinity.prefix(request.prompt))
        verifiers = self._fleet.verifiers(need, now) if self._nursery is not None else ()
        if not verifiers:
            detail = f"no verifier serves {model.name} under acceptance rule {rule_of(request)} now"
            raise GenerationRefused("not_ready", detail, retry_after_s=1)
        chosen, max_new = first_fit(request, verifiers, self._settings.default_max_new_tokens)
        if len(self._sessions) >= self._settings.max_sessions:
            limit = self._settings.max_sessions
            raise GenerationRefused("overloaded", f"all {limit} sessions of this router are taken", retry_after_s=1)
        task = self._task(request, model, chosen, max_new)
        self._sessions[task.session] = task
        self._fleet.placed(chosen.uri)
        assert self._nursery is not None
        self._nursery.start_soon(self._keep, task)
        return task

    def set_sampling(self, session: bytes, sampling: Sampling) -> None:
        """Change the sampling profile of a running session from a round boundary on (6.6). It replaces the whole
        profile but for a seed that it does not name. Raises UnknownResource."""
        task = self._sessions.get(session)
        if task is None:
            raise UnknownResource("no such session at this router")
        task.set_sampling(sampling)

    # For sdcpctl

    def snapshot(self) -> RouterSnapshot:
        """Sessions in care, oldest first, then those that ended lately; instances by URI."""
        now = self._ports.clock.now()
        return RouterSnapshot(
            in_care=len(self._sessions),
            sessions=(
                *(describe_session(task, now) for task in self._sessions.values()),
                *(ended.view for ended in self._ended.values()),
            ),
            instances=tuple(describe_instance(one, now) for one in self._fleet.instances()),
            classes=self._traffic.views(Counter(task.placement.plan.traffic_class for task in self._sessions.values())),
        )

    # Inside

    async def _watch_fleet(self) -> None:
        """6.9, decision 95: look at the fleet often enough to know when this loop stood still."""
        clock = self._ports.clock
        while True:
            await clock.sleep_until(clock.now() + self._fleet.tick_s)
            for one in self._fleet.tick(clock.now()):
                role = one.role.name.lower()
                self._ports.meters.count("instance_expirations_total", role=role)
                log.warning("instance expired", instance=one.uri, role=role, ttl_ms=one.status.ttl_ms)
            self._look()
            self._forget_ended(clock.now())

    def _look(self) -> None:
        now = self._ports.clock.now()
        self._traffic.look(self._fleet, now)
        for task in list(self._sessions.values()):
            if task.unread(now, self._settings.unread_limit_s):
                task.leave()
            task.look()

    async def _adopt_sessions(self) -> None:
        """Decision 106: what an earlier life of this router cared for."""
        await claim_sessions(
            self._ports,
            instance=self._instance,
            cache=self._cache,
            known=lambda session: session in self._sessions or session in self._ended,
            take=self._adopt,
            lost=self._end_lost,
        )
        self._directory_read = True

    async def _end_lost(self, claimed: Claimed) -> None:
        view, opened = await end_without_prompt(self._ports, claimed), claimed.record.open
        self._ended[opened.session] = Ended(view, self._ports.clock.now(), opened.commit_log, claimed.ref)

    def _adopt(self, claimed: Claimed) -> None:
        record = claimed.record
        assert claimed.prompt is not None
        plan = self._plan(
            record.open.session,
            record.open.contract,
            claimed.prompt,
            prompt_ref=record.open.prompt if isinstance(record.open.prompt, str) else None,
            verifier=record.verifier,
            verifier_boot=None,
            vocabulary=None if isinstance(record.vocabulary, UnsetType) else record.vocabulary,
            m_init=record.m_init,
            incarnation=record.incarnation,
            speculation=record.speculation,
            model=record.model,
            traffic_class=record.traffic_class,
            policy=record.policies[-1].sampling if record.policies else UNSET,
            logprobs=None if isinstance(record.open.logprobs, UnsetType) else record.open.logprobs,
        )
        task = SessionTask(
            Placement(plan, self._fleet, self._settings.patience),
            model=record.model,
            ports=self._ports,
            settings=self._settings,
            adopted=claimed,
            enrolled=self._traffic.take_up(record.traffic_class) if record.speculation else None,
        )
        self._sessions[plan.session] = task
        self._ports.meters.count("adopted_sessions_total")
        assert self._nursery is not None
        self._nursery.start_soon(self._keep, task)

    async def _keep(self, task: SessionTask) -> None:
        """Run a session to its end and remember how it ended."""
        plan = task.placement.plan
        bound = log.bind(session=session_path_id(plan.session), epoch=task.placement.epoch)
        bound.info(
            "session opens" if task.attended else "session taken up",
            round=0,
            model=task.model,
            verifier=plan.verifier,
            prompt_tokens=len(plan.prompt),
            max_new=plan.contract.max_new,
            speculation=plan.speculation,
            traffic_class=plan.traffic_class or None,
        )
        if task.attended:
            self._ports.meters.count("routed_sessions_total")
        await task.run()
        now = self._ports.clock.now()
        if task.enrolled is not None:
            self._traffic.ended(task.enrolled, task.placement, task.pace)
        view = describe_session(task, now)
        del self._sessions[task.session]
        self._ended[task.session] = Ended(view, now, plan.commit_log, plan.record)
        self._forget_ended(now)
        ending = task.placement.ending
        assert ending is not None
        finish = {"finished": "finish", "failed": "fail"}.get(view.state, view.state)
        self._ports.meters.count("routed_sessions_ended_total", finish=finish)
        (bound.warning if view.state == "failed" else bound.info)(
            "session ended",
            round=view.round,
            state=view.state,
            reason=view.reason,
            detail=view.detail,
            committed_tokens=view.committed_tokens,
            age_s=view.age_s,
        )

    def _forget_ended(self, now: float) -> None:
        """Ended sessions are in the order of their ends. Their records go with them (106); one whose removal fails is
        found to have ended at the next start."""
        while self._ended:
            session, oldest = next(iter(self._ended.items()))
            overdue = oldest.ended_at + self._settings.ended_retention_s <= now
            if not overdue and len(self._ended) <= self._settings.ended_sessions:
                return
            del self._ended[session]
            self._forgotten[session] = None
            while len(self._forgotten) > FORGOTTEN_IDS:
                self._forgotten.popitem(last=False)
            if oldest.record is not None and self._nursery is not None:
                self._nursery.start_soon(self._remove_record, oldest.record)

    async def _remove_record(self, ref: str) -> None:
        await within(self._settings.publish_deadline_s, lambda: self._ports.objects.remove_record(ref))

    def _card(self, model: RoutedModel, now: float) -> ModelCard:
        live = self._fleet.verifiers(_need(model), now)
        known = live or self._fleet.known_verifiers(_need(model))
        return ModelCard(
            name=model.name,
            context_tokens=max((context_of(one) or 0 for one in known), default=0),
            vocabulary=max((vocabulary_of(one) or 0 for one in known), default=0),
            ready=self._nursery is not None and bool(live),
        )

    def _task(self, request: GenerationRequest, model: RoutedModel, verifier: Instance, max_new: int) -> SessionTask:
        session = self._ids.octets(16)
        assert session not in self._sessions, "random session ids do not meet"
        enrolled = self._traffic.enrol(request)
        members = contract_members(self._traffic.ladder(enrolled, self._ladders[model.name]), max_new)
        m_max = members.m_max if request.m_max is None else min(members.m_max, request.m_max)
        target = verifier.status.model
        assert not isinstance(target, UnsetType), "the fleet offers no verifier without a model"
        contract = Contract(
            target=target,
            tokenizer=model.tokenizer,
            rule=rule_of(request),
            sampling=contract_sampling(request),
            m_max=m_max,
            max_new=max_new,
            stop=request.stop,
            low_rounds=members.low_rounds,
            low_ratio=members.low_ratio,
            fallback=members.fallback,
            self_load=members.self_load,
            self_max=members.self_max,
            scope=UNSET if request.scope is None else request.scope,
        )
        plan = self._plan(
            session,
            contract,
            request.prompt,
            verifier=verifier.uri,
            verifier_boot=verifier.boot,
            vocabulary=vocabulary_of(verifier),
            m_init=min(members.m_init, m_max),
            incarnation=FIRST_INCARNATION,
            speculation=request.speculation and (enrolled is None or not enrolled.compared),
            model=model.name,
            policy=verifier_policy(request),
            logprobs=request.logprobs,
            methods=() if enrolled is None else enrolled.guard.rules.methods,
            traffic_class="" if enrolled is None else enrolled.name,
        )
        if len(plan.prompt) > self._settings.inline_prompt_tokens:
            plan = replace(plan, prompt_ref=plan.tokens_ref(FIRST_EPOCH, 0))
        placement = Placement(plan, self._fleet, self._settings.patience)
        return SessionTask(
            placement,
            model=model.name,
            ports=self._ports,
            settings=self._settings,
            enrolled=enrolled if request.speculation else None,
        )

    def _plan(self, session: bytes, contract: Contract, prompt: tuple[int, ...], **members: Any) -> Plan:
        """What is fixed for a session of this router, new or taken up.

        Its log and objects lie in the contract's scope. Its record does not, so that a router finds all of its own.
        """
        scope = None if isinstance(contract.scope, UnsetType) else contract.scope
        return Plan(
            session=session,
            contract=contract,
            prompt=prompt,
            router=self._instance,
            commit_log=log_reference(self._cache, scope, session),
            objects=object_reference(self._cache, scope, session, 1, 0, ObjectKind.TOKENS).removesuffix("1/0/tokens"),
            prompt_renew_s=min(self._settings.tokens_ttl_ms / 1000, LONGEST_LIFE_S) / 3,
            record=record_reference(self._cache, None, session),
            nonce=self._nonces.octets(8).hex(),
            jitter=0.5 + self._jitter.uniform() / 2,
            **members,
        )


class _Block:
    """The context manager of `Router.generation`."""

    def __init__(self, router: Router, request: GenerationRequest) -> None:
        self._router = router
        self._request = request
        self._task: SessionTask | None = None

    async def __aenter__(self) -> Generation:
        assert self._task is None, "a block is entered once"
        self._task = self._router.admit(self._request)
        return self._task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.leave()  # no-op when it has ended; nothing is awaited here, so a cancelled block leaves as well


def _need(model: RoutedModel, rule: int = Rule.GREEDY, prefix: bytes | None = None) -> VerifierNeed:
    return VerifierNeed(tokenizer=model.tokenizer, target=model.target, rule=rule, prefix=prefix)
