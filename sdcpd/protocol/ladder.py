"""Named escalation ladders: settings of an operator, turned into contract members (draft 4.1, 6.5; decision 103).

Theory: a contract carries its whole fallback list, and a list that runs out fails the session (6.5.2). How often the
verifier will consult the list depends on `max_new`, which an operator does not know when writing the configuration. So
the last entry may be written `self_decode*`, "as often as it takes", and is unrolled here for each contract.

How often that is at most: every escalation costs `low_rounds` rounds of at least one token each, and every period of
self-decoding adds `self_max` tokens. A session of `max_new` tokens therefore escalates at most
ceil(max_new / (low_rounds + self_max)) times on that entry; 16 more are spare. That holds only while no entry is
skipped, hence `self_load` 100 in the shipped ladder: below 100 a busy verifier skips the whole tail at once and fails
the session. `warnings` says so.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from sdcpd.protocol.messages import LADDER_ENTRIES_LIMIT
from sdcpd.protocol.terms import M_MAX_LIMIT, LadderAction, Percent

_ACTIONS: Final = {
    "reduce": LadderAction.REDUCE,
    "switch": LadderAction.SWITCH,
    "self_decode": LadderAction.SELF_DECODE,
    "fail": LadderAction.FAIL,
}
REPEATED: Final = "self_decode*"
"""The only entry that may repeat, and only at the end: the others do not carry a session on by themselves."""

SPARE_ENTRIES: Final = 16
WRITTEN_ENTRIES_LIMIT: Final = 64
"""Entries an operator may write out; leaves most of the contract's 1,024 to the repeated one."""

_LEAST_SELF_MAX: Final = 64
_REPEATS_AIMED_AT: Final = 960


class LadderError(ValueError):
    """A ladder that cannot be used. The text names the field and the remedy."""


class Ladder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[ladder.NAME]` table: how a session escalates and how far it speculates.

    `fallback`  ladder entries in order; the last may be `self_decode*`
    `low_rounds` R: low rounds in a row that escalate once (6.5.2)
    `low_ratio`  percent of proposed tokens below which a round is low; absent: only rounds that accept nothing
    `self_load`  verifier load in percent above which self_decode is skipped
    `self_max`   tokens of one self-decode period; absent: max(64, ceil(max_new / 960))
    `m_max`      upper bound on the length of a proposal
    `m_init`     limit of a fresh drafter before its first verdict; absent: `m_max` (decision 42)
    """

    fallback: Annotated[tuple[str, ...], Meta(min_length=1, max_length=WRITTEN_ENTRIES_LIMIT)] = (
        "reduce",
        "switch",
        REPEATED,
    )
    low_rounds: Annotated[int, Meta(ge=1, le=1000)] = 4
    low_ratio: Percent | UnsetType = UNSET
    self_load: Percent = 100
    self_max: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    m_max: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)] = 32
    m_init: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_entries(self.fallback)


class LadderMembers(Struct, frozen=True, kw_only=True):
    """The members of a contract that a ladder decides (4.1), and `m_init` of its assignments (5.2)."""

    fallback: tuple[LadderAction, ...]
    low_rounds: int
    low_ratio: Percent | UnsetType
    self_load: Percent
    self_max: int
    m_max: int
    m_init: int


def check_entries(fallback: tuple[str, ...]) -> None:
    """Raise LadderError unless every entry is known and only the last one repeats."""
    if not fallback:
        raise LadderError('fallback: is empty; write at least one entry, for example ["self_decode*"]')
    for index, entry in enumerate(fallback):
        if entry in _ACTIONS:
            continue
        if entry == REPEATED:
            if index != len(fallback) - 1:
                raise LadderError(
                    f'fallback[{index}]: "{REPEATED}" repeats as often as needed, so nothing after it is ever '
                    f'reached; move it to the end or write "self_decode"'
                )
            continue
        if entry.endswith("*"):
            raise LadderError(f'fallback[{index}]: "{entry}" cannot repeat; only "{REPEATED}" may, as the last entry')
        near = difflib.get_close_matches(entry, [*_ACTIONS, REPEATED], n=1)
        remedy = f'did you mean "{near[0]}"?' if near else f"use one of {', '.join([*_ACTIONS, REPEATED])}"
        raise LadderError(f'fallback[{index}]: unknown entry "{entry}"; {remedy}')


def contract_members(ladder: Ladder, max_new: int) -> LadderMembers:
    """The contract members of `ladder` for a session of at most `max_new` tokens (decision 103).

    A configured `self_max` is raised where the repeated entry would otherwise need more than the 1,024 entries that
    a contract holds: running out would fail the session, longer periods only speculate a little later.
    """
    assert max_new >= 0
    written = ladder.fallback
    self_max = max(_LEAST_SELF_MAX, -(-max_new // _REPEATS_AIMED_AT))
    if isinstance(ladder.self_max, int):
        self_max = ladder.self_max
    if written[-1] == REPEATED:
        head = tuple(_ACTIONS[entry] for entry in written[:-1])
        room = LADDER_ENTRIES_LIMIT - len(head) - SPARE_ENTRIES
        self_max = max(self_max, -(-max_new // room) - ladder.low_rounds)
        repeats = -(-max_new // (ladder.low_rounds + self_max)) + SPARE_ENTRIES
        fallback = head + (LadderAction.SELF_DECODE,) * repeats
    else:
        fallback = tuple(_ACTIONS[entry] for entry in written)
    assert len(fallback) <= LADDER_ENTRIES_LIMIT
    return LadderMembers(
        fallback=fallback,
        low_rounds=ladder.low_rounds,
        low_ratio=ladder.low_ratio,
        self_load=ladder.self_load,
        self_max=self_max,
        m_max=ladder.m_max,
        m_init=min(ladder.m_init, ladder.m_max) if isinstance(ladder.m_init, int) else ladder.m_max,
    )


def warnings(name: str, ladder: Ladder) -> tuple[str, ...]:
    """What `sdcpd --check` should say of a ladder that is legal but can end a session for want of acceptance."""
    found = []
    if ladder.fallback[-1] != REPEATED:
        found.append(
            f"ladder.{name}.fallback can run out, which fails the session; "
            f'end it with "{REPEATED}" unless that is what you want'
        )
    if any(entry in ("self_decode", REPEATED) for entry in ladder.fallback) and ladder.self_load < 100:
        found.append(
            f"ladder.{name}.self_load = {ladder.self_load}: a verifier with a higher load skips every self_decode "
            f"entry, so the ladder can run out and fail the session; set it to 100 unless that is what you want"
        )
    if isinstance(ladder.m_init, int) and ladder.m_init > ladder.m_max:
        found.append(f"ladder.{name}.m_init = {ladder.m_init} is above m_max = {ladder.m_max}; m_max is used")
    return tuple(found)


SHIPPED: Final = "default"
"""Name of the ladder that exists without configuration; `[ladder.default]` replaces it."""


def named(ladders: Mapping[str, Ladder], name: str, field: str) -> Ladder:
    """The ladder that the setting `field` names. Raises LadderError that says which there are."""
    known = {SHIPPED: Ladder(), **ladders}
    if name not in known:
        raise LadderError(f"{field}: there is no [ladder.{name}]; add it, or use one of {', '.join(sorted(known))}")
    return known[name]
