"""What a seed decides before the run begins: shape of the cluster, workload, which faults are on, and how often.

Swarm testing: each class of faults is on or off for the whole run. Runs with few classes reach states that a storm of
all of them would never let live, and a quiet run shows that the cluster works when nothing is done to it.
"""

import random
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from msgspec import Struct

from sdcpd.protocol.ladder import Ladder
from sdcpd.protocol.terms import Rule
from tests.sim.oracle import VOCABULARY

# Each class with the range its rate is drawn from. Chances are per message, pass or write; rates per virtual second.
FAULTS: Final[Mapping[str, tuple[float, float]]] = {
    # network, per directed link
    "slow_links": (0.01, 0.3),  # mean of the exponential tail, seconds: what reorders messages
    "request_lost": (0.005, 0.1),
    "answer_lost": (0.005, 0.1),
    "connection_reset": (0.005, 0.1),
    "request_repeated": (0.01, 0.1),
    "link_clogged": (0.05, 0.5),
    "partition": (0.03, 0.3),
    # nodes
    "verifier_crash": (0.02, 0.2),
    "drafter_crash": (0.05, 0.5),
    "cache_crash": (0.05, 0.4),
    "router_crash": (0.02, 0.1),
    "node_pause": (0.05, 0.4),
    "clock_rate": (0.02, 0.2),  # largest deviation
    "clock_jump": (0.05, 0.3),
    # log and disk
    "append_conflict": (0.005, 0.05),
    "append_unanswered": (0.01, 0.1),
    "write_torn": (0.002, 0.02),
    "sync_slow": (0.05, 0.3),
    "sync_failed": (0.001, 0.01),
    "disk_full": (0.03, 0.3),
    "bit_rot": (0.02, 0.2),
    # cache
    "object_evicted": (0.1, 1.0),
    "content_cut": (0.01, 0.2),
    "content_stalled": (0.01, 0.2),
    # engine
    "pass_slow": (0.01, 0.1),
    "pass_not_finite": (0.0005, 0.005),
    "rows_dear": (0.05, 0.5),  # cost of a row as a share of a pass: load swings across self_load
    # drafters
    "over_m_cap": (0.02, 0.3),
    "stale_base": (0.02, 0.3),
    "wrong_digest": (0.02, 0.3),
    "wrong_epoch": (0.02, 0.3),
    "outside_vocabulary": (0.02, 0.3),
    "other_body": (0.02, 0.3),
    "silence": (0.01, 0.1),
    "rows_false": (0.02, 0.3),
    # their rows, on the way to a verifier that fetches them
    "rows_late": (0.05, 0.5),
    "rows_lost": (0.02, 0.3),
    # routers
    "foreign_fence": (0.03, 0.3),  # another router takes a session for its own
    "router_doubled": (0.02, 0.1),  # another process takes its place, and it runs on
}

LADDERS: Final = (
    Ladder(),
    Ladder(fallback=("self_decode*",), self_max=4, low_rounds=2),
    Ladder(fallback=("reduce", "reduce", "switch", "self_decode*"), low_rounds=1, self_max=8, m_max=8),
    Ladder(fallback=("switch", "self_decode*"), low_rounds=2, low_ratio=60, self_load=40, m_max=4),
    Ladder(fallback=("reduce", "self_decode", "switch", "fail"), low_rounds=2, self_max=3, m_init=2),
    Ladder(fallback=("fail",), low_rounds=3, low_ratio=20),
)


class Rows(Enum):
    """How a drafter shows its rows under rule 2."""

    CERTAIN = "certain"  # one-hot (55)
    INLINE = "inline"
    BY_REFERENCE = "by_reference"


class DrafterPlan(Struct, frozen=True):
    """`agrees` is the chance that a drafted token is the target's own. A rogue commits the drafter faults drawn."""

    agrees: float
    rogue: bool
    rows: Rows = Rows.INLINE


class PolicyPlan(Struct, frozen=True):
    """Another profile, asked for once so many tokens were read. A seed that it does not name is kept."""

    after: int
    temperature_milli: int
    top_k: int
    top_p_milli: int
    seed: int | None


class ClientPlan(Struct, frozen=True, kw_only=True):
    """One request. `leaves_after` tokens its client goes away (None: stays); it reads each page for `reads_s`."""

    begins_s: float
    model: str
    prompt: tuple[int, ...]
    max_new: int
    stop: tuple[int, ...]
    speculation: bool
    leaves_after: int | None
    reads_s: float
    rule: int = Rule.GREEDY
    temperature_milli: int = 0
    top_k: int = 0
    top_p_milli: int = 1000
    seed: int | None = None
    policies: tuple[PolicyPlan, ...] = ()


class SimOptions(Struct, frozen=True, kw_only=True):
    seed: int
    verifiers: int
    drafters: tuple[DrafterPlan, ...]
    clients: tuple[ClientPlan, ...]
    ladders: Mapping[str, Ladder]
    faults: Mapping[str, float]
    ttl_ms: int
    pages: int
    pass_s: float
    waiting_limit_s: float
    durable: bool
    """The journal syncs; without, it survives the end of its process only."""

    @classmethod
    def from_seed(cls, seed: int) -> "SimOptions":
        chance = random.Random(f"options {seed}")
        ladders = {"a": chance.choice(LADDERS), "b": chance.choice(LADDERS)}
        share = chance.choice((0.0, 0.1, 0.25, 0.25, 0.5, 0.8))
        return cls(
            seed=seed,
            verifiers=chance.choice((1, 1, 2, 3)),
            drafters=tuple(
                DrafterPlan(
                    agrees=chance.choice((0.0, 0.5, 0.8, 0.95, 1.0)),
                    rogue=chance.random() < 0.4,
                    rows=chance.choice(tuple(Rows)),
                )
                for _ in range(chance.choice((0, 1, 1, 2, 3)))
            ),
            clients=tuple(_client(chance) for _ in range(chance.choice((1, 2, 4, 6, 10)))),
            ladders=ladders,
            faults={
                name: low * (high / low) ** chance.random()
                for name, (low, high) in FAULTS.items()
                if chance.random() < share
            },
            ttl_ms=chance.choice((1500, 5000, 20000)),
            pages=chance.choice((8, 16, 64)),
            pass_s=chance.choice((0.002, 0.01, 0.05)),
            waiting_limit_s=chance.choice((8.0, 20.0, 60.0)),
            durable=chance.random() < 0.8,
        )


def _client(chance: random.Random) -> ClientPlan:
    max_new = chance.choice((1, 2, 8, 24, 48, 64, 64))
    return ClientPlan(
        begins_s=chance.choice((0.0, chance.uniform(0, 10), chance.uniform(0, 10))),
        model=chance.choice("ab"),
        prompt=tuple(chance.randrange(VOCABULARY) for _ in range(chance.choice((1, 2, 7, 20)))),
        max_new=max_new,
        stop=tuple(chance.randrange(VOCABULARY) for _ in range(chance.choice((0, 0, 0, 1, 2)))),
        speculation=chance.random() < 0.85,
        leaves_after=chance.randrange(max_new + 1) if chance.random() < 0.15 else None,
        reads_s=chance.choice((0.0, 0.0, 0.0, 0.5)),
        **_sampling(chance, max_new),
    )


def _sampling(chance: random.Random, max_new: int) -> dict[str, Any]:
    """A rule with its profile, and sometimes other profiles on the way."""
    rule = chance.choice((Rule.GREEDY, Rule.SPECULATIVE_SAMPLING, Rule.REPLAYABLE_SAMPLING))
    if rule is Rule.GREEDY:
        return {}
    needs_seed = rule is Rule.REPLAYABLE_SAMPLING
    policies = [
        PolicyPlan(
            chance.randrange(max_new + 1), **_profile(chance), seed=_seed(chance) if chance.random() < 0.5 else None
        )
        for _ in range(chance.choice((0, 0, 0, 1, 2)))
    ]
    return {
        "rule": rule,
        **_profile(chance),
        "seed": _seed(chance) if needs_seed or chance.random() < 0.7 else None,
        "policies": tuple(sorted(policies, key=lambda policy: policy.after)),
    }


def _profile(chance: random.Random) -> dict[str, int]:
    return {
        "temperature_milli": chance.choice((1, 500, 1000, 1000, 1700)),
        "top_k": chance.choice((0, 0, 1, 5, 40)),
        "top_p_milli": chance.choice((1000, 1000, 900, 300)),
    }


def _seed(chance: random.Random) -> int:
    return chance.choice((0, (1 << 64) - 1, chance.getrandbits(64)))
