"""The fault atlas: what the system assumes, and what a session may fail for. Keep it readable; it is a specification.

What is never injected, because no implementation could survive it:

    the log      Octets that were synced are not lost: there is one copy (decision 105 names the remedy). One bit of
                 them may rot; then the sessions in that journal may fail, and no wrong octet may ever be served.
    power        A journal that does not sync (`page_cache`) loses its process, never its power (decision 109).
    return       Whoever crashes or is paused comes back within `LONGEST_OUTAGE_S`. The router and the node of the log
                 are single; verifiers and drafters may all be down at once, for as long.
    clocks       Rates differ by at most a fifth; jumps go forward, by at most `LONGEST_JUMP_S`.
    doubles      A router process that another one took the place of ends within `LONGEST_DOUBLE_S` of its waking. No
                 other node is doubled: a verifier's address belongs to one process at a time.
    honesty      Routers, verifiers and caches stop, stall and come back, and never lie. Drafters may do anything.
    the end      In the second phase all of this is over: whatever is still open then has to end.

Everything else may happen at any time and together.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from sdcpd.protocol.ladder import Ladder
from tests.sim.injector import Injector
from tests.sim.options import SimOptions

if TYPE_CHECKING:
    from tests.sim.workload import Ended

LONGEST_OUTAGE_S: Final = 12.0
LONGEST_JUMP_S: Final = 20.0
LONGEST_DOUBLE_S: Final = 20.0

_LINKS: Final = (
    "slow_links",
    "request_lost",
    "answer_lost",
    "connection_reset",
    "link_clogged",
    "partition",
)
_TIME: Final = ("node_pause", "clock_jump", "clock_rate", "pass_slow")
_STORE: Final = (
    "cache_crash",
    "append_conflict",
    "append_unanswered",
    "write_torn",
    "sync_slow",
    "sync_failed",
    "disk_full",
    "bit_rot",
)
_SILENT_VERIFIER: Final = ("verifier_crash", *_LINKS, *_TIME)
_ROGUE: Final = (
    "over_m_cap",
    "stale_base",
    "wrong_digest",
    "wrong_epoch",
    "outside_vocabulary",
    "other_body",
    "silence",
    "rows_false",
    "rows_lost",
    "rows_late",
)

# Why a session may fail, by the beginning of its reason and (in brackets) its detail. A reason that is not here
# is never accepted, nor is one of which nothing happened.
EXCUSES: Final[Mapping[str, tuple[str, ...]]] = {
    # The router's own codes (protocol/placement.py)
    "verifier_lost (3 failovers in a row": (*_SILENT_VERIFIER, "foreign_fence", "router_doubled"),
    "verifier_lost ()": (*_SILENT_VERIFIER, "foreign_fence", "router_doubled"),  # as a log says that a router gave up
    "log_unusable": ("bit_rot",),
    "log_damaged": ("bit_rot",),
    "log_lost": ("bit_rot",),
    "directory_unreachable (409 the record is damaged": ("bit_rot",),
    "taken_over": ("bit_rot",),  # as far as the record that could say by whom is damaged
    "verifier_unreachable": (*_SILENT_VERIFIER, *_STORE),
    "verifier_overloaded": (*_SILENT_VERIFIER, *_STORE, "rows_dear"),
    "verifier_refused": ("bit_rot",),
    "cancelled": ("router_doubled",),  # by the one that took it up: its client reads at the other (106)
    # What a router says that came back
    "no_such_session": ("bit_rot",),  # in the directory, which keeps it by the same journal
    "no_such_session (begun by a double": ("router_doubled",),  # after the other had read the directory
    "output_gone": ("bit_rot",),
    # The verifier's own words (protocol/session.py)
    "the model produced non-finite logits": ("pass_not_finite",),
    "no drafter for too long": (*_SILENT_VERIFIER, "drafter_crash", "router_crash", *_ROGUE),
}
# Of a session of which its client has not seen a token: it is told at once (503) and asks anew.
COME_AGAIN: Final[Mapping[str, tuple[str, ...]]] = {
    "directory_unreachable (507": ("disk_full",),
}
LADDER_EXHAUSTED: Final = "the fallback ladder is exhausted"


def may_lose_power(options: SimOptions) -> bool:
    return options.durable


def excused(ended: "Ended", ladder: Ladder, inject: Injector) -> bool:
    """May a session of this ladder fail so, after what was injected so far?"""
    return can_run_out(ladder) if ended.reason == LADDER_EXHAUSTED else _known(EXCUSES, ended, inject)


def may_ask_anew(ended: "Ended", inject: Injector) -> bool:
    """Has its client been told to come again, with good reason?"""
    return ended.how == "failed" and ended.tokens == 0 and _known(COME_AGAIN, ended, inject)


def _known(reasons: Mapping[str, tuple[str, ...]], ended: "Ended", inject: Injector) -> bool:
    told = f"{ended.reason} ({ended.detail})"
    return any(told.startswith(reason) and inject.any(*classes) for reason, classes in reasons.items())


def can_run_out(ladder: Ladder) -> bool:
    """A ladder that ends in `fail`, or that a busy verifier may skip to its end."""
    return not ladder.fallback[-1].endswith("*") or ladder.self_load < 100
