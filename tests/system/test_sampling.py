"""Rules 2 and 65281 through the whole cluster: real roles, encoding, cache and log; a toy target with several likely
tokens (draft 6.3 to 6.6; decisions 18, 50, 51, 53, 63, 67, 101, 115)."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import UNSET
from msgspec.structs import replace
from trio.testing import MockClock

from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.drafting.settings import LookupSettings
from sdcpd.drafting.source import Draft, DraftSource
from sdcpd.edge.dispatch import verifier_dispatcher
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.commit_log import CommitRecord, Control, read_records, write_record
from sdcpd.protocol.distributions import Profile, draw, target_masses
from sdcpd.protocol.draft_rows import DraftRow, ids_of, row_of, values_of
from sdcpd.protocol.draws import Purpose, replay_draw, seeded_draw
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import Assignment, Proposal, Sampling
from sdcpd.protocol.terms import Action
from sdcpd.roles import verifier as verifier_role
from sdcpd.roles.generation import GenerationRefused, GenerationRequest
from sdcpd.roles.ports import Peer
from tests.support.chance import deviations
from tests.support.cluster import BASE, MODEL, Cluster, OracleSource, running_cluster
from tests.support.toy_engine import VOCABULARY, next_logits, next_token

PROMPT = (1, 2, 3, 4)
WARM = Profile(temperature_milli=1200, top_k=4, top_p_milli=950)


class SamplingSource(OracleSource):
    """Samples each token from a truncated row near the target's, with a stream of its own. `spread` entries a row."""

    def __init__(self, seed: int, spread: int = 3) -> None:
        super().__init__(lambda _context, _limit: [])
        self._random = random.Random(seed)
        self._spread = spread

    def row(self, context: Sequence[int]) -> DraftRow:
        best = sorted(range(VOCABULARY), key=lambda token: -next_logits(context)[token])[: self._spread]
        return row_of(
            [
                (token, 1.0 / self._spread + 0.1 * (1 if place == 0 else -1 / (self._spread - 1)))
                for place, token in enumerate(best)
            ]
        )

    def choose(self, row: DraftRow) -> int:
        return self._random.choices(ids_of(row), values_of(row))[0]

    def propose(self, session: bytes, limit: int, assumed: Sequence[int] = ()) -> Draft:
        context, rows, tokens = list(self._contexts[session]), [], []
        for _ in range(min(limit, 4)):
            rows.append(self.row(context))
            tokens.append(self.choose(rows[-1]))
            context.append(tokens[-1])
        return Draft(tokens=tuple(tokens), matched=0, rows=tuple(rows))


class SteeringSource(SamplingSource):
    """Proposes the third-best token, and reports a tiny q for it."""

    def row(self, context: Sequence[int]) -> DraftRow:
        ids = ids_of(super().row(context))
        return row_of([(ids[0], 0.5), (ids[1], 0.499), (ids[2], 0.001)])

    def choose(self, row: DraftRow) -> int:
        return ids_of(row)[2]


def lookup() -> LookupSource:
    return LookupSource(LookupSettings())


def replayed(count: int, profile: Profile, seed: int) -> list[int]:
    """The oracle of rule 65281: the target alone, token n by u(n)."""
    tokens = list(PROMPT)
    for k in range(1, count + 1):
        tokens.append(draw(target_masses(next_logits(tokens), profile), replay_draw(seed, k)))
    return tokens[len(PROMPT) :]


def wishes(profile: Profile) -> dict[str, Any]:
    return {
        "temperature_milli": profile.temperature_milli,
        "top_k": profile.top_k,
        "top_p_milli": profile.top_p_milli,
        "seed": profile.seed,
    }


def log_of(cluster: Cluster, session: bytes) -> list[CommitRecord]:
    hosted = cluster.verifier._hosted(session)
    assert hosted.machine is not None
    return list(hosted.machine.prefix._records)


# Rule 65281


@pytest.mark.parametrize("sources", [[], [lookup], [lambda: SamplingSource(1)], [lambda: SteeringSource(2)]])
async def test_the_text_is_a_function_of_the_request(
    tmp_path: Path, autojump_clock: MockClock, sources: list[Callable[[], DraftSource]]
) -> None:
    """Whatever is drafted, by whom, beside whom: the oracle's text."""
    made = [source() for source in sources]
    wrong = OracleSource(lambda context, limit: [next_token(context), *[5] * (limit - 1)])
    async with running_cluster(tmp_path, made or [wrong]) as cluster:
        results: dict[int, list[int]] = {}

        async def ask(seed: int, speculation: bool) -> None:
            tokens, _ = await cluster.generate(PROMPT, 40, speculation=speculation, **wishes(WARM) | {"seed": seed})
            assert results.setdefault(seed, tokens) == tokens

        async with trio.open_nursery() as nursery:
            for seed in range(4):
                nursery.start_soon(ask, seed, True)
                nursery.start_soon(ask, seed, False)
        assert results == {seed: replayed(40, WARM, seed) for seed in range(4)}
        assert len(set(map(tuple, results.values()))) == 4


async def test_rule_65281_goes_only_where_it_is_listed(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_role, "RULES_SERVED", (1, 2))
    async with running_cluster(tmp_path, [lookup()]) as cluster:
        with pytest.raises(GenerationRefused, match="rule 65281"):
            await cluster.generate(PROMPT, 4, temperature_milli=1000, seed=1)
        assert len((await cluster.generate(PROMPT, 4, temperature_milli=1000))[0]) == 4


# Rule 2


@pytest.mark.parametrize("make", [lookup, lambda: SamplingSource(3)])
async def test_sampled_text_has_the_targets_distribution(
    tmp_path: Path, autojump_clock: MockClock, make: Callable[[], DraftSource]
) -> None:
    """The first tokens of many sessions, through the wire format; and drafts are accepted at all."""
    sessions = 80
    async with running_cluster(tmp_path, [make()]) as cluster:
        firsts: Counter[int] = Counter()
        accepted = 0
        for _ in range(sessions):
            tokens, page = await cluster.generate(PROMPT, 3, **wishes(WARM))
            firsts[tokens[0]] += 1
            assert page.stats is not UNSET
            accepted += page.stats.accepted_tokens
    masses = target_masses(next_logits(PROMPT), WARM)
    total = sum(masses)
    assert all(masses[token] for token in firsts)
    cells = [(firsts[token], sessions * mass / total) for token, mass in enumerate(masses) if mass]
    assert abs(deviations(sum((got - want) ** 2 / want for got, want in cells), len(cells) - 1)) < 4.0
    assert accepted > 0
    assert cluster.meters.counts.get("draft_audit_alarms_total", 0) == 0


async def test_rows_are_fetched_where_they_do_not_come_along(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A verifier that does not know `sdcpd_q` says q-unavailable once; then the object precedes each proposal."""
    async with running_cluster(tmp_path, [SamplingSource(4)]) as cluster:
        seen = _strip_inline(cluster)
        tokens, page = await cluster.generate(PROMPT, 40, **wishes(WARM))
        assert len(tokens) == 40
        assert page.stats is not UNSET
        assert page.stats.accepted_tokens > 0
        assert page.stats.drafts == page.stats.rounds  # every round was a proposal
        assert [status for status in seen if status != 200] == [409]
        await trio.sleep(1)
        counts = cluster.meters.counts
        assert counts["proposals_refused_total"] == 1
        assert cluster.cache.snapshot().objects == 0  # removed with the outcome of their rounds


def _strip_inline(cluster: Cluster) -> list[int]:
    """Between drafter and verifier: proposals lose `sdcpd_q`. The list takes the status of each answer."""
    uri = f"{BASE}verifier/"
    handle = verifier_dispatcher(cluster.verifier, cluster.meters).handle
    statuses: list[int] = []

    async def stripped(peer: Peer, request: Request) -> Response:
        if request.path != "proposals":
            return await handle(peer, request)
        body = encode(replace(decode(request.body, Proposal), q=UNSET))
        response = await handle(peer, replace(request, body=body))
        statuses.append(response.status)
        return response

    cluster.network.withdraw(uri)
    cluster.network.serve(uri, stripped)
    return statuses


async def test_a_dishonest_drafter_is_noticed(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with running_cluster(tmp_path, [SteeringSource(5)]) as cluster:
        for _ in range(4):
            await cluster.generate(PROMPT, 60, **wishes(Profile()))
        assert cluster.meters.counts["draft_audit_alarms_total"] == 1
        (audit,) = cluster.verifier.snapshot().audits
        assert audit.z is not None
        assert audit.z > 6


async def test_a_seeded_rule_2_keeps_its_seed_from_drafters(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decision 18: contract and assignments are without the seed; the verifier has it before the first round."""
    async with running_cluster(tmp_path, [SamplingSource(6)]) as cluster:
        drafter = next(iter(cluster.drafters.values()))
        assignments: list[Assignment] = []
        original = drafter.assign

        async def assign(peer: Peer, assignment: Assignment) -> None:
            assignments.append(assignment)
            await original(peer, assignment)

        monkeypatch.setattr(drafter, "assign", assign)
        request = GenerationRequest(
            model=MODEL, prompt=PROMPT, max_new=20, stop=(), temperature_milli=900, seed=42, rule=2
        )
        async with cluster.router.generation(request) as generation:
            async for page in generation.pages():
                if page.final:
                    assert page.finish is Action.FINISH
            records = log_of(cluster, generation.session)
        first = records[0].ctl
        assert first is not UNSET
        assert first.sampling == Sampling(temperature_milli=900, top_k=0, top_p_milli=1000, seed=42)
        assert all(record.ctl is not UNSET and record.ctl.sampling is UNSET for record in records[1:])
        assert assignments
        for message in assignments:
            assert message.contract.sampling is not UNSET
            assert message.contract.sampling.seed is UNSET
            assert message.sampling == Sampling(temperature_milli=900, top_k=0, top_p_milli=1000)


async def test_self_decoded_rounds_draw_at_position_one(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Decision 69: "A self-decoded round is M = 0: i = 1, purpose 1"."""
    profile = Profile(temperature_milli=900)
    request = GenerationRequest(
        model=MODEL, prompt=PROMPT, max_new=12, stop=(), temperature_milli=900, seed=42, rule=2, speculation=False
    )
    tokens: list[int] = []
    async with running_cluster(tmp_path, [lookup()]) as cluster:
        async with cluster.router.generation(request) as generation:
            async for page in generation.pages():
                tokens += page.tokens
                if page.final:
                    break
            session = generation.session
    context = list(PROMPT)
    for round_, token in enumerate(tokens, 1):
        u = seeded_draw(42, session, round_, 1, Purpose.ADDITIONAL)
        assert token == draw(target_masses(next_logits(context), profile), u)
        context.append(token)
    assert len(tokens) == 12


@pytest.mark.parametrize("left_after_s", [0.0, 0.002, 0.01, 0.1])
async def test_a_client_that_leaves_early_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock, left_after_s: float
) -> None:
    """Also while naming still waits for the first policy."""
    request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=50, stop=(), temperature_milli=900, seed=42, rule=2)
    async with running_cluster(tmp_path, [lookup()]) as cluster:
        async with cluster.router.generation(request):
            await trio.sleep(left_after_s)
        await trio.sleep(5)
        assert cluster.engine.free_pages == cluster.engine.info.pages
        assert cluster.router.snapshot().in_care == 0


# Policies (6.6)


async def test_the_profile_changes_at_a_round_boundary(tmp_path: Path, autojump_clock: MockClock) -> None:
    """From some round on the text is that of the new profile; what was committed stays; the drafter is told."""
    cold = Sampling(temperature_milli=0)
    async with running_cluster(tmp_path, [lookup()]) as cluster:
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=200, stop=(), temperature_milli=2000, seed=9)
        tokens: list[int] = []
        async with cluster.router.generation(request) as generation:
            async for page in generation.pages():
                assert page.from_ == len(tokens)
                tokens += page.tokens
                if len(tokens) >= 20 and not any(_changed(log_of(cluster, generation.session))):
                    cluster.router.set_sampling(generation.session, cold)
                if page.final:
                    break
            records = log_of(cluster, generation.session)
        changed = [record for record in records if _changed([record])[0]]
        assert len(changed) == 1
        switched = changed[0].committed - len(changed[0].emitted)
        hot = Profile(temperature_milli=2000, seed=9)
        assert tokens[:switched] == replayed(switched, hot, 9)
        context = list(PROMPT) + tokens[:switched]
        for token in tokens[switched:]:
            assert token == next_token(context)
            context.append(token)
        assert len(tokens) == 200


def _changed(records: list[CommitRecord]) -> list[bool]:
    return [record.ctl is not UNSET and record.ctl.sampling is not UNSET for record in records]


def test_records_with_a_profile_are_read_back() -> None:
    """`ctl.sampling` survives the log's encoding."""
    profile = Sampling(temperature_milli=700, seed=2**64 - 1)
    control = Control(c=0, g=0, j=0, action=Action.CONTINUE, low=0, load=0, sampling=profile)
    record = CommitRecord(epoch=1, round=1, emitted=(1,), committed=1, digest=bytes(32), ctl=control)
    assert read_records(write_record(record))[0][0] == record
