"""The router role against scripted verifiers and drafters, in virtual time (draft 6.1, 6.7, 6.9; bugs 10, 11, 21)."""

import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import pytest
import trio
from msgspec import UNSET
from trio.testing import MockClock

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, write_record
from sdcpd.protocol.encoding import decode_tokens, encode
from sdcpd.protocol.ladder import Ladder, LadderError
from sdcpd.protocol.messages import Assignment, Event, Output, SessionOpen, SessionState, SpeculationStats, Status
from sdcpd.protocol.placement_values import Patience
from sdcpd.protocol.problems import Forbidden, IllFormed, StaleEpoch, UnknownResource
from sdcpd.protocol.terms import Action, LadderAction, State, session_path_id
from sdcpd.roles.generation import Generation, GenerationRefused, GenerationRequest, Generations, ModelCard
from sdcpd.roles.ports import Done, Peer, Peers, Ports, Refusal, Unreachable
from sdcpd.roles.router import Router
from sdcpd.roles.router_settings import RoutedModel, RouterSettings
from sdcpd.roles.router_views import RoutedSession
from tests.support.ports import InlineWorkers, MemoryLogs, SeededRandomness, TrioClock

T = TypeVar("T")

CACHE, ROUTER = "http://c.example/cache/", "http://r.example/router/"
V1, V2 = "http://v1.example/verifier/", "http://v2.example/verifier/"
D1, D2 = "http://d1.example/drafter/", "http://d2.example/drafter/"
MODEL, TOKENIZER = b"m" * 32, b"t" * 32
VOCABULARY, CONTEXT = 100, 64
ROUND_S = 0.05
BUSY = Refusal(503, None, "busy", retry_after_s=1)
BROKEN = Refusal(500, None, "broken")


def expected(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What a verifier's model says: a function of the prompt alone."""
    return tuple((sum(prompt) + 7 * index) % VOCABULARY for index in range(1, count + 1))


class Fault:
    """What happens to one call: refused, lost before or after it was carried out, or answered late."""

    def __init__(self, kind: str, refusal: Refusal | None = None) -> None:
        self.kind = kind
        self.refusal = refusal


class Hosted:
    """One session at a scripted verifier."""

    def __init__(self, opening: SessionOpen) -> None:
        assert isinstance(opening.prompt, tuple)
        self.opening = opening
        self.prompt = opening.prompt
        self.state = State.WAITING
        self.reason: str | None = None
        self.drafter: str | None = None
        self.seq = 0
        self.round = 0
        self.tokens: list[int] = []
        if opening.resume is not UNSET:
            self.round = opening.resume.round
            self.tokens = list(expected(self.prompt, opening.resume.committed))
        self.changed = trio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    @property
    def ended(self) -> bool:
        return self.state in (State.FINISHED, State.FAILED)

    def digest(self) -> bytes:
        start = digests.prompt_digest(digests.contract_digest(self.opening.contract), self.prompt)
        return digests.extend(start, self.tokens)

    def message(self) -> SessionState:
        return SessionState(
            session=self.opening.session,
            epoch=self.opening.epoch,
            round=self.round,
            committed=len(self.tokens),
            digest=self.digest(),
            state=int(self.state),
            seq=self.seq if self.seq else UNSET,
        )


class Cluster:
    """Scripted verifiers and drafters behind the Peers port, as the draft has them, with faults on order.

    A session decodes a token a round while it decodes by itself, two while a live drafter holds its latest
    assignment. `faults[operation]` holds what befalls the next calls of that operation.
    """

    nursery: trio.Nursery
    router: Router

    def __init__(self, objects: MemoryLogs) -> None:
        self.objects = objects
        self.hosted: dict[str, dict[bytes, Hosted]] = {V1: {}, V2: {}}
        self.assigned: dict[str, dict[bytes, Assignment]] = {D1: {}, D2: {}}
        self.instances: dict[str, dict[str, Any]] = {}
        self.mute: list[str] = []  # these neither report, nor answer, nor propose
        self.faults: dict[str, list[Fault]] = {}
        self.calls: list[tuple[str, str, bytes]] = []
        self.bodies: list[tuple[str, bytes]] = []
        self.prefill_s = 0.01
        self.switch_after = 0  # rounds with one drafter after which the verifier asks for another; 0 never
        self.decodes_alone = True
        self.rounds_by: dict[str, int] = {}
        self.weather: random.Random | None = None  # draws faults for every call

    # instances

    def add(self, uri: str, **members: Any) -> None:
        self.instances[uri] = members
        self.nursery.start_soon(self._report, uri)

    def status(self, uri: str) -> Status:
        verifier = "/verifier/" in uri
        fields: dict[str, Any] = {
            "instance": uri,
            "role": 2 if verifier else 1,
            "load": 0,
            "queue": 0,
            "ttl_ms": 3000,
            "tokenizer": TOKENIZER,
            "vocabulary": VOCABULARY,
            "boot": b"b" * 16,
        }
        if verifier:
            fields |= {"model": MODEL, "context_tokens": CONTEXT, "rules": (1,)}
        return Status(**fields | self.instances[uri])

    async def _report(self, uri: str) -> None:
        while uri in self.instances:
            if uri not in self.mute:
                await self.report(uri)
            await trio.sleep(1)

    async def report(self, uri: str, peer: Peer | None = None) -> None:
        role = "verifier" if "/verifier/" in uri else "drafter"
        await self.router.report_status(peer or Peer(uri=uri, role=role), uri, self.status(uri))

    # the wire

    async def _through(self, operation: str, to: str, session: bytes, body: bytes = b"") -> Fault | None:
        """Weather on the way there. Returns the fault that waits for the answer."""
        self.calls.append((operation, to, session))
        self.bodies.append((operation, body))
        await trio.sleep(0.001)
        queue = self.faults.get(operation, [])
        fault = queue.pop(0) if queue else None
        if self.weather is not None and self.weather.random() < 0.15:
            kinds = ["unreachable", "lost", "silent", "busy", "broken"]
            if operation == "cancel":
                kinds.remove("silent")  # two of these spend all the router's patience; a real verifier has limits (82)
            kind = self.weather.choice(kinds)
            fault = Fault(kind, {"busy": BUSY, "broken": BROKEN}.get(kind))
        if to in self.mute or (fault is not None and fault.kind == "silent"):
            await trio.sleep_forever()
        return fault

    async def _call(self, operation: str, to: str, session: bytes, body: bytes, carry_out: Any) -> Any:
        fault = await self._through(operation, to, session, body)
        if fault is not None and fault.kind == "unreachable":
            return Unreachable("connection refused")
        if fault is not None and fault.refusal is not None:
            return fault.refusal
        answer = await carry_out()
        if to in self.mute:
            await trio.sleep_forever()
        if fault is not None and fault.kind == "lost":
            return Unreachable("reset")
        return answer

    # verifiers

    async def open_session(self, verifier: str, message: SessionOpen) -> Any:
        async def carry_out() -> SessionState:
            await trio.sleep(self.prefill_s)
            known = self.hosted[verifier].get(message.session)
            if known is None or known.opening.epoch < message.epoch:
                known = self.hosted[verifier][message.session] = Hosted(message)
                self.nursery.start_soon(self._decode, verifier, known)
            assert known.opening == message  # decision 29
            return known.message()

        return await self._call("open", verifier, message.session, encode(message), carry_out)

    async def name_drafter(self, verifier: str, message: Assignment) -> Any:
        async def carry_out() -> SessionState | Refusal:
            one = self.hosted[verifier].get(message.session)
            if one is None:
                return Refusal(404, None, "no such session")
            if one.ended:
                return Refusal(410, "sdcp-session-closed", "over", state=one.message())
            assert isinstance(message.seq, int)
            if message.seq < one.seq:
                return Refusal(409, None, "late", state=one.message())
            if message.seq > one.seq:
                one.seq, one.drafter = message.seq, message.drafter
                one.state = State.DRAFTING
                if message.drafter == verifier:
                    one.state = State.SELF_DECODING if self.decodes_alone else State.WAITING
                one.notify()
            return one.message()

        return await self._call("name", verifier, message.session, encode(message), carry_out)

    async def read_output(self, verifier: str, session: bytes, from_: int, wait_s: float) -> Any:
        async def carry_out() -> Output | Refusal:
            one = self.hosted[verifier].get(session)
            if one is None:
                return Refusal(404, None, "no such session")
            with trio.move_on_after(wait_s):
                while len(one.tokens) <= from_ and not one.ended:
                    await one.changed.wait()
            stats = SpeculationStats(rounds=one.round, drafts=0, draft_tokens=0, accepted_tokens=0)
            return Output(
                session=session,
                epoch=one.opening.epoch,
                from_=from_,
                tokens=tuple(one.tokens[from_:]),
                final=one.ended,
                finish=UNSET if not one.ended else Action(int(one.state)),
                reason=UNSET if one.reason is None else one.reason,
                stats=stats if one.ended else UNSET,
            )

        return await self._call("read", verifier, session, b"", carry_out)

    async def cancel_session(self, verifier: str, session: bytes) -> Any:
        async def carry_out() -> Done | Refusal:
            one = self.hosted[verifier].get(session)
            if one is None:
                return Refusal(404, None, "no such session")
            if not one.ended:
                one.state, one.reason = State.FAILED, "cancelled"
                one.notify()
            return Done()

        return await self._call("cancel", verifier, session, b"", carry_out)

    async def _decode(self, verifier: str, one: Hosted) -> None:
        """What the verifier does with a session until it ends."""
        contract, rounds_here, told = one.opening.contract, 0, 0
        goal = expected(one.prompt, contract.max_new)
        while not one.ended:
            step = self._pace(one)
            if step == 0:
                with trio.move_on_after(0.05):
                    await one.changed.wait()
                continue
            seq = one.seq
            await trio.sleep(ROUND_S)
            if (self._pace(one), one.seq) != (step, seq) or verifier in self.mute:
                continue
            if self.hosted[verifier].get(one.opening.session) is not one:
                return
            added = goal[len(one.tokens) :][:step]
            one.tokens += added
            one.round += 1
            self._record(one, added)
            self.rounds_by[one.drafter or ""] = self.rounds_by.get(one.drafter or "", 0) + 1
            rounds_here = rounds_here + 1 if one.seq == told else 1
            told = one.seq
            if len(one.tokens) == len(goal):
                one.state = State.FINISHED
                await self._event(verifier, one, Action.FINISH)
            elif self.switch_after and rounds_here >= self.switch_after and one.state is State.DRAFTING:
                one.state = State.WAITING
                await self._event(verifier, one, Action.SWITCH)
            one.notify()

    def _record(self, one: Hosted, emitted: tuple[int, ...]) -> None:
        record = CommitRecord(
            epoch=one.opening.epoch,
            round=one.round,
            emitted=emitted,
            committed=len(one.tokens),
            digest=one.digest(),
        )
        logs, ref = self.objects.logs, one.opening.commit_log
        logs[ref] = logs.get(ref, b"") + write_record(record)

    def _pace(self, one: Hosted) -> int:
        if one.state is State.SELF_DECODING:
            return 1
        if one.state is not State.DRAFTING or one.drafter in self.mute or one.drafter is None:
            return 0
        held = self.assigned.get(one.drafter, {}).get(one.opening.session)
        return 2 if held is not None and held.seq == one.seq else 0

    async def _event(self, verifier: str, one: Hosted, kind: Action) -> None:
        event = Event(
            session=one.opening.session,
            epoch=one.opening.epoch,
            kind=kind,
            committed=len(one.tokens),
            digest=one.digest(),
            round=one.round,
            seq=one.seq,
        )
        await self.router.report_event(Peer(uri=verifier, role="verifier"), event)

    # drafters

    async def assign(self, drafter: str, message: Assignment) -> Any:
        async def carry_out() -> Done | Refusal:
            assert message.drafter == drafter
            start = digests.prompt_digest(digests.contract_digest(message.contract), cast(Any, message.prompt))
            tokens: tuple[int, ...] = ()
            if message.committed:
                assert isinstance(message.committed_tokens, str)
                tokens = decode_tokens(self.objects.objects[message.committed_tokens])
            assert len(tokens) == message.committed
            assert digests.extend(start, tokens) == message.digest
            self.assigned[drafter][message.session] = message
            for hosted in self.hosted.values():
                if message.session in hosted:
                    hosted[message.session].notify()
            return Done()

        return await self._call("assign", drafter, message.session, encode(message), carry_out)

    async def drop_assignment(self, drafter: str, session: bytes) -> Any:
        async def carry_out() -> Done:
            self.assigned[drafter].pop(session, None)
            return Done()

        return await self._call("drop", drafter, session, b"", carry_out)

    # what tests look at

    def operations(self, *without: str) -> list[str]:
        return [operation for operation, _, _ in self.calls if operation not in without]

    def running(self) -> int:
        return sum(not one.ended for hosted in self.hosted.values() for one in hosted.values())


class LabelledMeters:
    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], float] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, *labels.values())
        self.counts[key] = self.counts.get(key, 0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        raise AssertionError(name)


class JumpingClock(TrioClock):
    """A clock that can skip time, as after a suspended process."""

    def __init__(self) -> None:
        self.offset = 0.0

    def now(self) -> float:
        return super().now() + self.offset

    async def sleep_until(self, at: float) -> None:
        await super().sleep_until(at - self.offset)


class Stand:
    def __init__(self, router: Router, cluster: Cluster, meters: LabelledMeters, clock: JumpingClock) -> None:
        self.router = router
        self.cluster = cluster
        self.meters = meters
        self.clock = clock

    async def collect(self, request: GenerationRequest) -> tuple[tuple[int, ...], Output]:
        """All tokens of a generation and its final page."""
        async with self.router.generation(request) as generation:
            return await collect(generation)

    async def settled(self, within_s: float) -> None:
        """Nothing of any session is left at the router."""
        with trio.fail_after(within_s):
            while self.router.snapshot().in_care:
                await trio.sleep(0.05)

    def only(self) -> RoutedSession:
        (one,) = self.router.snapshot().sessions
        return one


async def collect(generation: Generation) -> tuple[tuple[int, ...], Output]:
    tokens: list[int] = []
    async for page in generation.pages():
        assert page.session == generation.session
        assert page.from_ == len(tokens)
        assert page.tokens or page.final
        tokens += page.tokens
        if page.final:
            return tuple(tokens), page
    raise AssertionError("pages ended without a final one")


def request(prompt: tuple[int, ...] = (5, 6, 7), max_new: int | None = 20, **members: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"model": "toy", "prompt": prompt, "max_new": max_new, "stop": (2,)}
    return GenerationRequest(**fields | members)


TOY = RoutedModel(name="toy", tokenizer=TOKENIZER)
QUICK = Patience(open_give_up_s=20, name_give_up_s=20)


def world(cluster: Cluster) -> tuple[Ports, LabelledMeters, JumpingClock]:
    """Ports over a scripted cluster."""
    meters, clock = LabelledMeters(), JumpingClock()
    ports = Ports(
        clock=clock,
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=meters,
        peers=cast(Peers, cluster),
        objects=cluster.objects,
    )
    return ports, meters, clock


@asynccontextmanager
async def stand(
    *instances: str,
    settings: RouterSettings | None = None,
    models: tuple[RoutedModel, ...] = (TOY,),
    ladders: dict[str, Ladder] | None = None,
) -> AsyncIterator[Stand]:
    cluster = Cluster(MemoryLogs())
    ports, meters, clock = world(cluster)
    router = Router(
        settings or RouterSettings(patience=QUICK),
        ports,
        instance=ROUTER,
        cache=CACHE,
        models=models,
        ladders=ladders or {},
    )
    cluster.router = router
    async with trio.open_nursery() as nursery:
        cluster.nursery = nursery
        await nursery.start(router.run)
        for uri in instances:
            cluster.add(uri)
        await trio.sleep(0.01)
        with trio.fail_after(3600):  # a deadlock under an autojump clock must end somewhere
            yield Stand(router, cluster, meters, clock)
        nursery.cancel_scope.cancel()


# -- one generation ------------------------------------------------------------------------------------------------


async def test_a_prompt_becomes_a_session_and_its_output_comes_back(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s:
        tokens, final = await s.collect(request())
        assert tokens == expected((5, 6, 7), 20)
        assert final.finish is Action.FINISH
        assert isinstance(final.stats, SpeculationStats)
        assert s.cluster.operations("read") == ["open", "name", "assign"]
        assert s.cluster.rounds_by == {D1: 10}
        (one,) = s.cluster.hosted[V1].values()
        contract = one.opening.contract
        assert (contract.target, contract.tokenizer, contract.rule) == (MODEL, TOKENIZER, 1)
        assert (contract.max_new, contract.stop, contract.m_max) == (20, (2,), 32)
        assert contract.fallback[:2] == (LadderAction.REDUCE, LadderAction.SWITCH)
        assert contract.scope is UNSET
        assert contract.sampling is UNSET
        assert one.opening.epoch == 1
        assert one.opening.router == ROUTER
        assert one.opening.commit_log == f"{CACHE}v1/s/-/l/{session_path_id(one.opening.session)}"
        await s.settled(1)
        assert s.meters.counts == {
            ("routed_sessions_total",): 1,
            ("routed_sessions_ended_total", "finish"): 1,
        }
        generations: Generations = s.router  # the front end's Protocol fits
        assert generations is s.router


async def test_tokens_are_handed_on_as_they_are_committed(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s, s.router.generation(request()) as generation:
        started = trio.current_time()
        arrived = [(page.from_ + len(page.tokens), trio.current_time() - started) async for page in generation.pages()]
        assert [count for count, _ in arrived] == list(range(2, 21, 2))
        for count, seconds in arrived:
            assert seconds == pytest.approx(count / 2 * ROUND_S, abs=ROUND_S)


async def test_without_a_drafter_the_verifier_decodes_alone_and_a_late_one_is_used(autojump_clock: MockClock) -> None:
    async with stand(V1) as s:
        async with s.router.generation(request(max_new=40)) as generation, trio.open_nursery() as nursery:
            nursery.start_soon(self_adding, s, D1)
            tokens, final = await collect(generation)
        assert tokens == expected((5, 6, 7), 40)
        assert final.finish is Action.FINISH
        assert s.cluster.rounds_by[V1] > 5
        assert s.cluster.rounds_by[D1] > 5
        assert s.meters.counts["reassignments_total", "drafter_appeared"] == 1


async def self_adding(s: Stand, uri: str) -> None:
    await trio.sleep(0.6)
    s.cluster.add(uri)


async def test_speculation_off_never_asks_a_drafter(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s:
        tokens, _ = await s.collect(request(speculation=False))
        assert tokens == expected((5, 6, 7), 20)
        assert s.cluster.rounds_by == {V1: 20}
        assert "assign" not in s.cluster.operations()


async def test_several_switches_keep_the_output(autojump_clock: MockClock) -> None:
    async with stand(V1, D1, D2) as s:
        s.cluster.switch_after = 2
        tokens, _ = await s.collect(request(max_new=40))
        assert tokens == expected((5, 6, 7), 40)
        assert s.cluster.rounds_by[D1] > 2
        assert s.cluster.rounds_by[D2] > 2
        assert s.meters.counts["reassignments_total", "switch"] >= 4


async def test_a_slow_reader_gets_everything_in_fewer_pages(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s, s.router.generation(request()) as generation:
        await trio.sleep(30)
        assert s.only().state == "finished"
        pages = [page async for page in generation.pages()]
        assert [page.tokens for page in pages] == [expected((5, 6, 7), 20)]
        assert pages[0].final


async def test_many_sessions_spread_over_verifiers_and_drafters(autojump_clock: MockClock) -> None:
    async with stand(V1, V2, D1, D2) as s:
        results: list[tuple[int, ...]] = []

        async def one(index: int) -> None:
            tokens, _ = await s.collect(request(prompt=(index + 1,)))
            assert tokens == expected((index + 1,), 20)
            results.append(tokens)

        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(one, index)
        assert len(results) == 8
        assert [len(hosted) for hosted in s.cluster.hosted.values()] == [4, 4]
        assert s.cluster.rounds_by[D1] == s.cluster.rounds_by[D2]


# -- faults of every step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["open", "name", "assign", "read", "drop"])
@pytest.mark.parametrize("kind", ["unreachable", "lost", "silent", "busy", "broken"])
@pytest.mark.parametrize("times", [1, 2])
async def test_passing_faults_cost_time_only(autojump_clock: MockClock, operation: str, kind: str, times: int) -> None:
    async with stand(V1, D1, D2, settings=RouterSettings(open_deadline_s=5, patience=QUICK)) as s:
        s.cluster.switch_after = 3
        refusal = {"busy": BUSY, "broken": BROKEN}.get(kind)
        s.cluster.faults[operation] = [Fault(kind, refusal) for _ in range(times)]
        tokens, final = await s.collect(request(max_new=40))
        assert tokens == expected((5, 6, 7), 40)
        assert final.finish is Action.FINISH
        await s.settled(20)
        assert s.cluster.faults[operation] == []
        (hosted,) = (one for one in s.cluster.hosted.values() if one)
        assert len(hosted) == 1  # decision 30: never at a second verifier
        if operation != "read":
            bodies = [body for name, body in s.cluster.bodies if name == operation]
            if operation in ("open", "name") or kind != "busy":
                assert bodies[0] == bodies[1]  # decision 36: the identical body


async def test_a_dead_drafter_costs_speed_only(autojump_clock: MockClock) -> None:
    """6.9: when a drafter's status expires, the router reassigns its sessions."""
    async with stand(V1, D1, D2) as s, s.router.generation(request(max_new=40)) as generation:
        await trio.sleep(0.3)
        victim = s.only().drafter
        assert victim is not None
        s.cluster.mute.append(victim)
        tokens, final = await collect(generation)
        assert tokens == expected((5, 6, 7), 40)
        assert final.finish is Action.FINISH
        assert s.meters.counts["instance_expirations_total", "drafter"] == 1
        assert s.meters.counts["reassignments_total", "drafter_expired"] == 1


async def test_all_drafters_dead_means_decoding_alone(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s, s.router.generation(request(max_new=40)) as generation:
        await trio.sleep(0.3)
        s.cluster.mute.append(D1)
        tokens, _ = await collect(generation)
        assert tokens == expected((5, 6, 7), 40)
        assert s.cluster.rounds_by[V1] > 5


async def test_a_lost_verifiers_session_goes_on_at_another(autojump_clock: MockClock) -> None:
    async with stand(V1, V2, D1) as s, s.router.generation(request(max_new=50)) as generation:
        await trio.sleep(0.3)
        lost = s.only().verifier
        s.cluster.mute.append(lost)
        started = trio.current_time()
        tokens, final = await collect(generation)
        assert trio.current_time() - started < 3.5 + 50 * ROUND_S
        assert final.finish is Action.FINISH
        assert tokens == expected((5, 6, 7), 50)
        assert (s.only().epoch, final.epoch) == (2, 2)
        assert s.only().verifier == ({V1, V2} - {lost}).pop()
        assert s.meters.counts["failover_total", "expired"] == 1


async def test_a_lost_verifier_without_another_fails_the_session_in_time(autojump_clock: MockClock) -> None:
    settings = RouterSettings(patience=Patience(failover_give_up_s=10))
    async with stand(V1, D1, settings=settings) as s, s.router.generation(request(max_new=50)) as generation:
        await trio.sleep(0.3)
        s.cluster.mute.append(V1)
        started = trio.current_time()
        tokens, final = await collect(generation)
        assert trio.current_time() - started < 14
        assert (final.finish, final.reason) == (Action.FAIL, "verifier_lost")
        assert tokens == expected((5, 6, 7), 50)[: len(tokens)]
        await s.settled(30)
        assert s.only().detail is not None
        assert s.meters.counts["routed_sessions_ended_total", "fail"] == 1


async def test_a_verifier_that_restarted_is_noticed_at_its_next_report(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s, s.router.generation(request(max_new=50)) as generation:
        await trio.sleep(0.3)
        s.cluster.hosted[V1].clear()
        s.cluster.instances[V1] = {"boot": b"c" * 16}
        tokens, final = await collect(generation)
        assert tokens == expected((5, 6, 7), 50)
        assert (final.finish, final.epoch) == (Action.FINISH, 2)
        assert s.only().verifier == V1


async def test_a_silent_open_is_given_up(autojump_clock: MockClock) -> None:
    settings = RouterSettings(open_deadline_s=5, patience=QUICK)
    async with stand(V1, settings=settings) as s:
        s.cluster.faults["open"] = [Fault("silent") for _ in range(20)]
        tokens, final = await s.collect(request())
        assert tokens == ()
        assert (final.finish, final.reason) == (Action.FAIL, "verifier_unreachable")
        assert s.cluster.running() == 0


async def test_a_refused_open_ends_with_the_verifiers_word_for_the_operator(autojump_clock: MockClock) -> None:
    async with stand(V1) as s:
        s.cluster.faults["open"] = [Fault("no", Refusal(422, "sdcp-bad-contract", "rule 1 is not served"))]
        _, final = await s.collect(request())
        assert (final.finish, final.reason) == (Action.FAIL, "verifier_refused")
        await s.settled(1)
        assert s.only().detail == "422 sdcp-bad-contract rule 1 is not served"


async def test_a_router_that_stood_still_accuses_nobody(autojump_clock: MockClock) -> None:
    """Decision 95."""
    async with stand(V1, D1) as s, s.router.generation(request(max_new=40)) as generation:
        await trio.sleep(0.3)
        s.clock.offset += 60.0
        tokens, final = await collect(generation)
        assert tokens == expected((5, 6, 7), 40)
        assert final.finish is Action.FINISH
        assert not any(name == "instance_expirations_total" for name, *_ in s.meters.counts)


@pytest.mark.parametrize("seed", range(12))
async def test_bad_weather(autojump_clock: MockClock, seed: int) -> None:
    """Any call may fail in any way, drafters come and go, clients leave: output is right, and nothing is left over."""
    draw = random.Random(seed)
    settings = RouterSettings(open_deadline_s=5, patience=Patience(poll_s=5))
    async with stand(V1, V2, D1, D2, settings=settings) as s:
        s.cluster.switch_after = draw.randrange(4)
        s.cluster.weather = draw

        async def client(index: int, patience_s: float) -> None:
            await trio.sleep(draw.uniform(0, 5))
            with trio.move_on_after(patience_s):
                tokens, final = await s.collect(request(prompt=(index, seed % VOCABULARY), max_new=draw.randint(1, 60)))
                assert final.finish is Action.FINISH, s.router.snapshot()
                assert tokens == expected((index, seed % VOCABULARY), len(tokens))

        async def drafters_come_and_go() -> None:
            while True:
                await trio.sleep(draw.uniform(0, 10))
                uri = draw.choice([D1, D2])
                s.cluster.mute = [] if uri in s.cluster.mute else [uri]

        async with trio.open_nursery() as clients:
            s.cluster.nursery.start_soon(drafters_come_and_go)
            for index in range(8):
                clients.start_soon(client, index, draw.choice([600.0, 600.0, 3.0]))
        await s.settled(60)
        assert len(s.router.snapshot().sessions) == 8
        s.cluster.weather = None
        await trio.sleep(1)
        assert s.cluster.running() == 0
        for by_session in s.cluster.hosted.values():
            for one in by_session.values():
                assert one.state is State.FINISHED or one.reason == "cancelled"


# -- clients that leave (bug 21) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "cancelled", "raised"])
async def test_a_client_that_leaves_frees_everything_within_2_s(autojump_clock: MockClock, how: str) -> None:
    async with stand(V1, D1) as s:

        async def client() -> None:
            async with s.router.generation(request(max_new=50)) as generation:
                async for page in generation.pages():
                    if len(page.tokens) + page.from_ >= 4:
                        if how == "cancelled":
                            await trio.sleep_forever()
                        if how == "raised":
                            raise KeyError
                        break

        with trio.move_on_after(1.0):
            try:
                await client()
            except KeyError:
                assert how == "raised"
        assert s.cluster.operations().count("cancel") <= 1
        await s.settled(2)
        assert s.cluster.running() == 0
        assert s.cluster.assigned[D1] == {}
        one = s.only()
        assert (one.state, one.reason) == ("cancelled", "cancelled")
        assert s.meters.counts["routed_sessions_ended_total", "cancelled"] == 1


async def test_fifty_clients_that_leave_at_once(autojump_clock: MockClock) -> None:
    async with stand(V1, V2, D1, D2) as s:

        async def client(index: int) -> None:
            async with s.router.generation(request(prompt=(index,), max_new=50)) as generation:
                async for _ in generation.pages():
                    pass

        async with trio.open_nursery() as nursery:
            for index in range(50):
                nursery.start_soon(client, index)
            await trio.sleep(0.2)
            assert s.cluster.running() == 50
            nursery.cancel_scope.cancel()
        await s.settled(2)
        assert s.cluster.running() == 0
        assert all(not assigned for assigned in s.cluster.assigned.values())
        snapshot = s.router.snapshot()
        assert len(snapshot.sessions) == 50


async def test_a_client_that_leaves_during_a_long_prefill(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s:
        s.cluster.prefill_s = 15.0
        with trio.move_on_after(0.5):
            await s.collect(request())
        await trio.sleep(10)
        assert s.only().state == "cancelled"
        await trio.sleep(8)
        assert s.cluster.running() == 0  # created after the cancel, and cancelled then
        assert len(s.cluster.hosted[V1]) == 1
        await s.settled(1)


async def test_a_client_that_leaves_before_anything_was_sent_costs_nothing(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s:
        async with s.router.generation(request()):
            pass
        await s.settled(1)
        assert s.cluster.operations() == []


@pytest.mark.parametrize("kind", ["unreachable", "lost", "silent", "busy"])
async def test_a_cancel_is_repeated_until_it_is_through(autojump_clock: MockClock, kind: str) -> None:
    async with stand(V1, D1) as s:
        fault = Fault(kind, BUSY if kind == "busy" else None)
        s.cluster.faults["cancel"] = [fault]
        with trio.move_on_after(0.5):
            await s.collect(request(max_new=50))
        await s.settled(10)
        assert s.cluster.running() == 0


async def test_leaving_after_the_final_page_cancels_nothing(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s:
        await s.collect(request())
        await trio.sleep(1)
        assert "cancel" not in s.cluster.operations()
        assert "drop" not in s.cluster.operations()


async def test_stopping_the_router_ends_its_generations(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s, s.router.generation(request(max_new=50)) as generation:
        finals: list[Output] = []

        async def read() -> None:
            finals.append((await collect(generation))[1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.2)
            assert s.router._nursery is not None
            s.router._nursery.cancel_scope.cancel()
        assert (finals[0].finish, finals[0].reason) == (Action.FAIL, "router_stopped")
        assert s.router.ready() == (False, "the router is not running")


# -- what is refused up front (bugs 10, 11) ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "reason", "param"),
    [
        ({"model": "other"}, "unknown_model", "model"),
        ({"prompt": ()}, "invalid", "prompt"),
        ({"prompt": (VOCABULARY,)}, "invalid", "prompt"),
        ({"prompt": (1 << 32,)}, "invalid", "prompt"),
        ({"prompt": (-1,)}, "invalid", "prompt"),
        ({"max_new": -1}, "invalid", "max_tokens"),
        ({"stop": tuple(range(1025))}, "invalid", "stop"),
        ({"prompt": (1,) * 64, "max_new": None}, "context_length", "prompt"),
        ({"prompt": (1,) * 64, "max_new": 1}, "context_length", "prompt"),
        ({"prompt": (1,) * 60, "max_new": 5}, "context_length", "max_tokens"),
    ],
)
async def test_what_cannot_be_served_opens_no_session(
    autojump_clock: MockClock, members: dict[str, Any], reason: str, param: str
) -> None:
    async with stand(V1, D1) as s:
        with pytest.raises(GenerationRefused) as caught:
            async with s.router.generation(request(**members)):
                pass
        assert (caught.value.reason, caught.value.param) == (reason, param)
        assert s.cluster.operations() == []
        assert s.router.snapshot().sessions == ()


@pytest.mark.parametrize(("prompt", "max_new", "gets"), [(60, 4, 4), (63, None, 1), (63, 1, 1), (4, None, 60)])
async def test_what_just_fits_is_served(autojump_clock: MockClock, prompt: int, max_new: int | None, gets: int) -> None:
    async with stand(V1, D1) as s:
        tokens, final = await s.collect(request(prompt=(1,) * prompt, max_new=max_new))
        assert len(tokens) == gets
        assert final.finish is Action.FINISH


async def test_stop_tokens_outside_the_vocabulary_are_passed_on_unchanged(autojump_clock: MockClock) -> None:
    """Decision 19: harmless, and their order enters the digest."""
    async with stand(V1) as s:
        await s.collect(request(stop=(151645, 2, 2)))
        (one,) = s.cluster.hosted[V1].values()
        assert one.opening.contract.stop == (151645, 2, 2)


async def test_a_verifier_with_more_context_is_chosen_where_the_first_is_too_small(autojump_clock: MockClock) -> None:
    async with stand(D1) as s:
        s.cluster.add(V1)
        s.cluster.add(V2, context_tokens=200, load=50)
        await trio.sleep(0.01)
        assert s.router.models()[0].context_tokens == 200
        tokens, _ = await s.collect(request(max_new=150))
        assert len(tokens) == 150
        assert len(s.cluster.hosted[V2]) == 1


async def test_full_means_full_until_a_session_is_gone(autojump_clock: MockClock) -> None:
    async with stand(V1, D1, settings=RouterSettings(max_sessions=1)) as s:
        async with s.router.generation(request()) as generation:
            with pytest.raises(GenerationRefused) as caught:
                async with s.router.generation(request()):
                    pass
            assert caught.value.reason == "overloaded"
            assert caught.value.retry_after_s is not None
            await collect(generation)
        await trio.sleep(0.1)
        tokens, _ = await s.collect(request())
        assert len(tokens) == 20


# -- models and readiness ------------------------------------------------------------------------------------------


async def test_models_and_readiness_follow_the_verifiers(autojump_clock: MockClock) -> None:
    other = RoutedModel(name="other", tokenizer=TOKENIZER, target=b"o" * 32)
    async with stand(models=(TOY, other)) as s:
        assert s.router.models() == (
            ModelCard(name="toy", context_tokens=0, vocabulary=0, ready=False),
            ModelCard(name="other", context_tokens=0, vocabulary=0, ready=False),
        )
        ready, why = s.router.ready()
        assert not ready
        assert "toy" in why
        with pytest.raises(GenerationRefused) as caught:
            async with s.router.generation(request()):
                pass
        assert caught.value.reason == "not_ready"
        s.cluster.add(V1)
        await trio.sleep(0.01)
        assert s.router.models() == (
            ModelCard(name="toy", context_tokens=CONTEXT, vocabulary=VOCABULARY, ready=True),
            ModelCard(name="other", context_tokens=0, vocabulary=0, ready=False),
        )
        assert s.router.ready() == (True, "")
        s.cluster.mute.append(V1)
        await trio.sleep(4)
        assert s.router.models()[0] == ModelCard(name="toy", context_tokens=CONTEXT, vocabulary=VOCABULARY, ready=False)
        assert s.meters.counts["instance_expirations_total", "verifier"] == 1


async def test_ladders_by_model(autojump_clock: MockClock) -> None:
    short = Ladder(fallback=("switch", "fail"), low_rounds=2, m_max=5, m_init=3)
    model = RoutedModel(name="toy", tokenizer=TOKENIZER, ladder="short")
    async with stand(V1, D1, models=(model,), ladders={"short": short}) as s:
        await s.collect(request())
        (one,) = s.cluster.hosted[V1].values()
        contract = one.opening.contract
        assert contract.fallback == (LadderAction.SWITCH, LadderAction.FAIL)
        assert (contract.low_rounds, contract.m_max) == (2, 5)
        (held,) = s.cluster.assigned[D1].values()
        assert held.m_init == 3


def test_a_ladder_that_does_not_exist_is_named() -> None:
    ports, _, _ = world(Cluster(MemoryLogs()))
    with pytest.raises(LadderError, match=r"router\.default_ladder: there is no \[ladder\.slow\]"):
        Router(RouterSettings(default_ladder="slow"), ports, instance=ROUTER, cache=CACHE, models=(TOY,), ladders={})


# -- status and events ---------------------------------------------------------------------------------------------


async def test_an_instance_speaks_for_itself_only(autojump_clock: MockClock) -> None:
    async with stand() as s:
        s.cluster.instances[D1] = {}
        status = s.cluster.status(D1)
        for peer, instance, problem in (
            (Peer(uri=D2, role="drafter"), D1, Forbidden),
            (Peer(uri=D1, role="verifier"), D1, Forbidden),
            (Peer(uri=D1, role="drafter"), D2, IllFormed),
            (Peer(uri=D1, role="drafter"), "not a uri", IllFormed),
        ):
            with pytest.raises(problem):
                await s.router.report_status(peer, instance, status)
        assert s.router.snapshot().instances == ()


async def test_base_uris_are_compared_in_their_canonical_form(autojump_clock: MockClock) -> None:
    """Decisions 27, 31."""
    async with stand() as s:
        s.cluster.instances[D1] = {"instance": "HTTP://D1.example:80/drafter"}
        await s.router.report_status(Peer(uri=D1, role="drafter"), D1, s.cluster.status(D1))
        assert [one.instance for one in s.router.snapshot().instances] == [D1]


async def test_events_of_strangers_and_of_other_epochs_are_refused(autojump_clock: MockClock) -> None:
    async with stand(V1, V2, D1) as s:
        verifier = Peer(uri=V1, role="verifier")
        event = Event(session=b"x" * 16, epoch=1, kind=Action.SWITCH, committed=0, digest=b"d" * 32)
        with pytest.raises(UnknownResource):
            await s.router.report_event(verifier, event)
        async with s.router.generation(request()) as generation:
            await trio.sleep(0.1)
            mine = Event(session=generation.session, epoch=1, kind=Action.SWITCH, committed=0, digest=b"d" * 32)
            for peer in (Peer(uri=V2, role="verifier"), Peer(uri=V1, role="drafter"), Peer(uri=D1, role="drafter")):
                with pytest.raises(Forbidden):
                    await s.router.report_event(peer, mine)
            with pytest.raises(StaleEpoch):
                await s.router.report_event(
                    verifier, Event(session=mine.session, epoch=0, kind=mine.kind, committed=0, digest=mine.digest)
                )
            await collect(generation)
        await s.settled(1)
        await s.router.report_event(verifier, mine)  # late: taken, and changes nothing
        with pytest.raises(StaleEpoch):
            await s.router.report_event(
                verifier, Event(session=mine.session, epoch=2, kind=mine.kind, committed=0, digest=mine.digest)
            )


# -- what sdcpctl sees ---------------------------------------------------------------------------------------------


async def test_the_snapshot_tells_where_a_session_is(autojump_clock: MockClock) -> None:
    async with stand(V1, D1) as s:
        s.cluster.prefill_s = 0.5
        async with s.router.generation(request(max_new=50)) as generation:
            await trio.sleep(0.1)
            assert s.only().state == "opening"
            await trio.sleep(1)
            one = s.only()
            assert one.session == session_path_id(generation.session)
            assert (one.state, one.verifier, one.drafter) == ("drafting", V1, D1)
            assert (one.model, one.epoch, one.prompt_tokens, one.max_new) == ("toy", 1, 3, 50)
            assert 10 < one.committed_tokens < 50
            assert one.age_s == pytest.approx(1.1, abs=0.05)
            await collect(generation)
        await s.settled(1)
        one = s.only()
        assert (one.state, one.committed_tokens, one.reason) == ("finished", 50, None)
        assert one.round == 25


async def test_instances_are_shown_with_what_they_reported(autojump_clock: MockClock) -> None:
    async with stand() as s:
        s.cluster.add(V1, load=7, queue=2)
        s.cluster.add(D1, accept_milli=640)
        await trio.sleep(0.51)
        drafter, verifier = s.router.snapshot().instances
        assert (drafter.instance, drafter.role, drafter.accept_milli, drafter.model) == (D1, "drafter", 640, None)
        assert (verifier.role, verifier.load, verifier.queue, verifier.model) == ("verifier", 7, 2, MODEL.hex())
        assert verifier.age_ms == pytest.approx(510, abs=15)
        assert (verifier.ttl_ms, verifier.expired) == (3000, False)
        s.cluster.mute.append(V1)
        await trio.sleep(4)
        assert s.router.snapshot().instances[1].expired


async def test_ended_sessions_are_remembered_within_bounds(autojump_clock: MockClock) -> None:
    settings = RouterSettings(ended_sessions=3, ended_retention_s=100)
    async with stand(V1, D1, settings=settings) as s:
        for index in range(5):
            await s.collect(request(prompt=(index,), max_new=4))
        await s.settled(1)
        assert [one.prompt_tokens for one in s.router.snapshot().sessions] == [1, 1, 1]
        await trio.sleep(101)
        assert s.router.snapshot().sessions == ()


def test_the_router_starts_without_torch() -> None:
    code = "import sys, sdcpd.roles.router; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
