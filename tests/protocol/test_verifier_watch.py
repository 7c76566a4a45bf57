"""Whether the process that serves a session is still there (draft 6.9; decisions 48, 95)."""

from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.verifier_watch import UNHEARD_GRACE_S, VerifierWatch
from tests.support.messages import VERIFIER, status

OLD, NEW = b"o" * 16, b"n" * 16


def reported(fleet: Fleet, boot: bytes, now: float) -> None:
    fleet.report(status(instance=VERIFIER, role=2, boot=boot), now)


def test_expired_or_restarted() -> None:
    fleet = Fleet()
    reported(fleet, OLD, 0.0)
    watch = VerifierWatch(fleet, VERIFIER, OLD)
    assert watch.trouble(0.5) is None
    reported(fleet, NEW, 1.0)
    assert watch.trouble(1.0) == "restarted"
    for now in (1.5, 2.0, 2.5, 3.0, 3.5, 3.9):
        fleet.tick(now)
    assert watch.trouble(4.0) == "expired"


def test_a_verifier_that_tells_no_boot_is_judged_by_its_status_alone() -> None:
    fleet = Fleet()
    reported(fleet, NEW, 0.0)
    assert VerifierWatch(fleet, VERIFIER, None).trouble(0.5) is None


def test_the_next_status_tells_the_boot_where_it_is_not_sure() -> None:
    fleet = Fleet()
    reported(fleet, OLD, 0.0)
    watch = VerifierWatch(fleet, VERIFIER, OLD)
    watch.moved(VERIFIER, OLD, 0.5, unsure=True)
    assert watch.trouble(0.5) is None
    reported(fleet, NEW, 1.0)
    assert watch.trouble(1.0) is None, "it had restarted before the session came back"
    reported(fleet, OLD, 1.5)
    assert watch.trouble(1.5) == "restarted"


def test_one_that_was_found_by_asking_is_spared_for_a_while() -> None:
    watch = VerifierWatch(Fleet(), VERIFIER, None)
    assert watch.trouble(0.0) == "expired"
    watch.found(VERIFIER, 0.0)
    assert watch.trouble(UNHEARD_GRACE_S - 0.1) is None
    assert watch.trouble(UNHEARD_GRACE_S) == "expired"
