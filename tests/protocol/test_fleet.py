"""The router's view of instances: life by ttl, preference by load, queue and acceptance (draft 6.1, 6.9; 95, 102)."""

from typing import Any

import pytest
from msgspec import UNSET

from sdcpd.protocol.fleet import DrafterNeed, Fleet, VerifierNeed
from sdcpd.protocol.messages import Status
from sdcpd.protocol.problems import IllFormed, Overloaded

TOKENIZER, OTHER, MODEL = b"t" * 32, b"u" * 32, b"m" * 32
SESSION = b"s" * 16


def status(name: str, **members: Any) -> Status:
    role = 2 if name.startswith("v") else 1
    fields: dict[str, Any] = {
        "instance": f"http://h/{name}/",
        "role": role,
        "load": 0,
        "queue": 0,
        "ttl_ms": 3000,
        "tokenizer": TOKENIZER,
        "vocabulary": 100,
        "boot": b"b" * 16,
    }
    if role == 2:
        fields |= {"model": MODEL, "context_tokens": 64}
    return Status(**fields | members)


def uri(name: str) -> str:
    return f"http://h/{name}/"


def need(**members: Any) -> DrafterNeed:
    fields: dict[str, Any] = {"session": SESSION, "tokenizer": TOKENIZER, "vocabulary": 100, "drafters": None}
    return DrafterNeed(**fields | members)


def chosen(fleet: Fleet, now: float, **members: Any) -> str | None:
    one = fleet.choose_drafter(need(**members), now)
    return None if one is None else one.uri


def watch(fleet: Fleet, start: float, end: float) -> list[str]:
    """Tick as the router does, and collect who expires."""
    gone, now = [], start
    while now < end:
        now = min(now + fleet.tick_s, end)
        gone += [one.uri for one in fleet.tick(now)]
    return gone


def test_a_status_counts_for_its_ttl_from_receipt() -> None:
    """6.1: MUST NOT assign sessions to an instance whose status has expired."""
    fleet = Fleet()
    assert fleet.report(status("d1"), 100.0).fresh
    assert watch(fleet, 100.0, 102.9) == []
    assert chosen(fleet, 102.9) == uri("d1")
    assert chosen(fleet, 103.0) is None
    assert not fleet.alive(uri("d1"), 103.0)
    assert watch(fleet, 102.9, 104.0) == [uri("d1")]
    assert watch(fleet, 104.0, 110.0) == []
    assert fleet.report(status("d1"), 110.0).fresh
    assert fleet.alive(uri("d1"), 110.0)


def test_reports_before_expiry_keep_it_alive_and_are_not_fresh() -> None:
    fleet = Fleet()
    fleet.report(status("d1"), 0.0)
    for step in range(1, 20):
        assert watch(fleet, step - 1.0, float(step)) == []
        report = fleet.report(status("d1"), float(step))
        assert not report.fresh
        assert not report.rebooted


def test_a_router_that_stood_still_judges_nobody() -> None:
    """Decision 95: its own loop stood still longer than ttl/3: every instance gets a fresh ttl."""
    fleet = Fleet()
    fleet.report(status("d1"), 0.0)
    fleet.report(status("v1", ttl_ms=60_000), 0.0)
    assert watch(fleet, 0.0, 1.0) == []
    assert fleet.tick(9.0) == ()
    assert fleet.alive(uri("d1"), 9.0)
    assert watch(fleet, 9.0, 11.9) == []
    assert watch(fleet, 11.9, 12.5) == [uri("d1")]
    # The gap of 8 s was no third of a minute: the other ttl still counts from receipt.
    assert watch(fleet, 12.5, 59.9) == []
    assert watch(fleet, 59.9, 60.1) == [uri("v1")]


def test_standing_still_does_not_raise_the_dead() -> None:
    fleet = Fleet()
    fleet.report(status("d1"), 0.0)
    assert watch(fleet, 0.0, 3.5) == [uri("d1")]
    fleet.tick(60.0)
    assert not fleet.alive(uri("d1"), 60.0)


def test_a_report_after_standing_still_does_not_condemn_the_others() -> None:
    """The first status read after the stall may come before the first tick."""
    fleet = Fleet()
    fleet.report(status("d1"), 0.0)
    fleet.report(status("d2"), 0.0)
    fleet.report(status("d2"), 20.0)
    assert fleet.tick(20.0) == ()
    assert fleet.alive(uri("d1"), 20.0)


def test_a_changed_boot_is_noticed() -> None:
    fleet = Fleet()
    assert not fleet.report(status("d1"), 0.0).rebooted
    assert fleet.report(status("d1", boot=b"c" * 16), 0.5).rebooted
    assert not fleet.report(status("d1", boot=b"c" * 16), 1.0).rebooted
    fleet.report(status("d2", boot=UNSET), 1.0)
    assert not fleet.report(status("d2", boot=b"c" * 16), 1.5).rebooted


def test_the_tick_follows_the_shortest_live_ttl() -> None:
    fleet = Fleet()
    assert fleet.tick_s == 0.5
    fleet.report(status("d1"), 0.0)
    fleet.report(status("d2", ttl_ms=600), 0.0)
    assert fleet.tick_s == pytest.approx(0.1)
    watch(fleet, 0.0, 0.7)
    assert fleet.tick_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"load": 10}, {"load": 60}),
        ({"queue": 1}, {"queue": 5}),
        ({"accept_milli": 800}, {"accept_milli": 300}),
        ({"accept_milli": 700}, {}),
        ({}, {"accept_milli": 200}),
    ],
)
def test_drafters_with_low_load_low_queue_and_high_acceptance_are_preferred(
    better: dict[str, Any], worse: dict[str, Any]
) -> None:
    for first, second in (("d1", "d2"), ("d2", "d1")):
        fleet = Fleet()
        fleet.report(status(first, **better), 0.0)
        fleet.report(status(second, **worse), 0.0)
        assert chosen(fleet, 0.1) == uri(first)


def test_equals_are_ordered_by_uri_whatever_the_order_of_their_reports() -> None:
    fleet = Fleet()
    for name in ("d2", "d3", "d1"):
        fleet.report(status(name), 0.0)
    assert chosen(fleet, 0.1) == uri("d1")


def test_placements_between_reports_spread_over_equals() -> None:
    fleet = Fleet()
    for name in ("d1", "d2", "d3"):
        fleet.report(status(name), 0.0)
    seen = []
    for _ in range(6):
        one = chosen(fleet, 0.1)
        assert one is not None
        seen.append(one)
        fleet.placed(one)
    assert sorted(seen) == sorted([uri("d1"), uri("d2"), uri("d3")] * 2)
    fleet.report(status("d1"), 0.2)
    assert chosen(fleet, 0.2) == uri("d1")


def test_drafters_of_a_preferred_method_come_first_and_others_for_want_of_them() -> None:
    """A traffic class prefers methods, in order; load, queue and acceptance decide among equals."""
    fleet = Fleet()
    fleet.report(status("d1"), 0.0)
    assert chosen(fleet, 0.0, methods=("suffix",)) == uri("d1"), "one that tells no method is better than nobody"
    fleet.report(status("d2", method="suffix", load=90), 0.0)
    fleet.report(status("d3", method="suffix", load=80), 0.0)
    fleet.report(status("d4", method="ngram", accept_milli=1000), 0.0)
    assert chosen(fleet, 0.0) == uri("d4")
    assert chosen(fleet, 0.0, methods=("suffix", "ngram")) == uri("d3")
    assert chosen(fleet, 0.0, methods=("draft_model", "ngram")) == uri("d4")
    assert chosen(fleet, 0.0, methods=("suffix",), avoid=uri("d3")) == uri("d2")


def test_the_same_drafter_again_only_for_want_of_another() -> None:
    fleet = Fleet()
    fleet.report(status("d1"), 0.0)
    assert chosen(fleet, 0.1, avoid=uri("d1")) == uri("d1")
    fleet.report(status("d2", load=90, accept_milli=0), 0.1)
    assert chosen(fleet, 0.1, avoid=uri("d1")) == uri("d2")
    assert chosen(fleet, 0.1, excluded=[uri("d2")], avoid=uri("d1")) == uri("d1")
    assert chosen(fleet, 0.1, excluded=[uri("d2"), uri("d1")]) is None


@pytest.mark.parametrize(
    ("members", "wanted", "fits"),
    [
        ({"tokenizer": OTHER}, {}, False),
        ({"tokenizer": UNSET}, {}, True),
        ({"vocabulary": 104}, {}, False),
        ({"vocabulary": UNSET}, {}, True),
        ({"vocabulary": 104}, {"vocabulary": None}, True),
        ({"declined": (SESSION,)}, {}, False),
        ({"declined": (b"x" * 16,)}, {}, True),
        ({"model": MODEL}, {"drafters": (MODEL,)}, True),
        ({"model": OTHER}, {"drafters": (MODEL,)}, False),
        ({"model": UNSET}, {"drafters": (MODEL,)}, False),
        ({"role": 2}, {}, False),
    ],
)
def test_who_may_draft(members: dict[str, Any], wanted: dict[str, Any], fits: bool) -> None:
    fleet = Fleet()
    fleet.report(status("d1", **members), 0.0)
    assert (chosen(fleet, 0.1, **wanted) is not None) is fits


def verifiers(fleet: Fleet, now: float, target: bytes | None = None, rule: int = 1) -> list[str]:
    return [one.uri for one in fleet.verifiers(VerifierNeed(tokenizer=TOKENIZER, target=target, rule=rule), now)]


def test_verifiers_by_load_and_queue() -> None:
    fleet = Fleet()
    fleet.report(status("v1", load=50), 0.0)
    fleet.report(status("v2", load=10, queue=1), 0.0)
    fleet.report(status("v3", load=10), 0.0)
    fleet.report(status("v4", tokenizer=OTHER), 0.0)
    fleet.report(status("v5", model=UNSET), 0.0)
    fleet.report(status("d1"), 0.0)
    assert verifiers(fleet, 0.1) == [uri("v3"), uri("v2"), uri("v1")]
    assert verifiers(fleet, 0.1, target=MODEL) == verifiers(fleet, 0.1)
    assert verifiers(fleet, 0.1, target=OTHER) == []


def test_rules_are_asked_of_verifiers_that_list_them() -> None:
    """Decisions 12, 115: private rules only where the status lists them; the draft's two unless it lists others."""
    fleet = Fleet()
    fleet.report(status("v1", rules=(1,)), 0.0)
    fleet.report(status("v2", load=1), 0.0)
    assert verifiers(fleet, 0.1, rule=1) == [uri("v1"), uri("v2")]
    assert verifiers(fleet, 0.1, rule=2) == [uri("v2")]
    assert verifiers(fleet, 0.1, rule=65281) == []


def test_what_expired_is_still_told_of_for_a_while() -> None:
    fleet = Fleet()
    fleet.report(status("v1"), 0.0)
    assert watch(fleet, 0.0, 4.0) == [uri("v1")]
    known = fleet.known_verifiers(VerifierNeed(tokenizer=TOKENIZER, target=None, rule=1))
    assert [one.uri for one in known] == [uri("v1")]
    watch(fleet, 4.0, 604.0)
    assert fleet.instances() == ()


def test_instances_are_bounded_and_the_dead_make_room() -> None:
    fleet = Fleet(limit=2)
    fleet.report(status("d1"), 0.0)
    fleet.report(status("d2"), 0.5)
    with pytest.raises(Overloaded):
        fleet.report(status("d3"), 0.6)
    fleet.report(status("d2"), 0.7)
    watch(fleet, 0.7, 2.6)
    fleet.report(status("d2"), 2.7)
    watch(fleet, 2.7, 3.2)
    fleet.report(status("d3"), 3.2)
    assert [one.uri for one in fleet.instances()] == [uri("d2"), uri("d3")]


@pytest.mark.parametrize("ttl_ms", [0, 149])
def test_a_ttl_that_no_loop_can_keep_is_refused(ttl_ms: int) -> None:
    fleet = Fleet()
    with pytest.raises(IllFormed, match="ttl_ms"):
        fleet.report(status("d1", ttl_ms=ttl_ms), 0.0)
    assert fleet.instances() == ()


def test_an_endless_ttl_is_read_as_ten_minutes() -> None:
    fleet = Fleet()
    fleet.report(status("d1", ttl_ms=10**12), 0.0)
    assert watch(fleet, 0.0, 599.0) == []
    assert watch(fleet, 599.0, 601.0) == [uri("d1")]
