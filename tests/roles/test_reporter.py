"""Status reports: often enough, whatever the routers do (draft 6.1; decisions 48, 97)."""

from itertools import pairwise
from typing import cast

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from sdcpd.protocol.messages import Status
from sdcpd.roles.ports import Done, Objects, Peers, Ports, Refusal, Unreachable
from sdcpd.roles.reporter import GAP_S, Reporter
from tests.support.messages import ROUTER, status
from tests.support.ports import CountingMeters, InlineWorkers, SeededRandomness, TrioClock

OTHER_ROUTER = "https://q.example/router/"
DOWN = Unreachable(reason="refused")


class Routers:
    """Takes reports. `answers[router]` is what it says, or "hang"."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, str, Status]] = []
        self.answers: dict[str, Done | Refusal | Unreachable | str] = {}
        self.delay_s = 0.0

    async def report_status(self, router: str, message: Status) -> Done | Refusal | Unreachable:
        self.reports.append((trio.current_time(), router, message))
        answer = self.answers.get(router, Done())
        if isinstance(answer, str):
            await trio.sleep_forever()
        await trio.sleep(self.delay_s)
        assert not isinstance(answer, str)
        return answer

    def times(self, router: str = ROUTER) -> list[float]:
        return [at for at, to, _ in self.reports if to == router]


def reporter(routers: Routers, *names: str) -> Reporter:
    ports = Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=CountingMeters(),
        peers=cast(Peers, routers),
        objects=cast(Objects, None),
    )
    return Reporter(names or (ROUTER,), lambda: status(queue=len(routers.reports)), ports)


def ready(made: Reporter) -> bool:
    return made.accepted


async def test_a_report_every_third_of_the_ttl(autojump_clock: MockClock) -> None:
    routers = Routers()
    made = reporter(routers)
    assert not ready(made)
    with trio.move_on_after(4.5):
        await made.run()
    assert routers.times() == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert [message.queue for _, _, message in routers.reports] == [0, 1, 2, 3, 4], "each says what is true then"


async def test_an_instance_is_ready_while_a_router_takes_its_status(autojump_clock: MockClock) -> None:
    """Decision 97."""
    routers = Routers()
    routers.answers[ROUTER] = DOWN
    made = reporter(routers, ROUTER, OTHER_ROUTER)
    routers.answers[OTHER_ROUTER] = DOWN
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        await trio.sleep(0.5)
        assert not ready(made)
        routers.answers[OTHER_ROUTER] = Done()
        await trio.sleep(1.2)
        assert ready(made)
        routers.answers[OTHER_ROUTER] = "hang"
        await trio.sleep(1.5)
        assert ready(made)
        await trio.sleep(2.5)
        assert not ready(made), "the last status taken has expired"
        nursery.cancel_scope.cancel()


async def test_a_router_that_hangs_delays_nobody_and_is_asked_again(autojump_clock: MockClock) -> None:
    routers = Routers()
    routers.answers[OTHER_ROUTER] = "hang"
    with trio.move_on_after(4.5):
        await reporter(routers, OTHER_ROUTER, ROUTER).run()
    assert routers.times() == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert len(routers.times(OTHER_ROUTER)) in (3, 4)


async def test_a_router_that_starts_is_found_soon_and_not_hammered(autojump_clock: MockClock) -> None:
    routers = Routers()
    routers.answers[ROUTER] = DOWN
    with trio.move_on_after(10):
        await reporter(routers).run()
    gaps = [after - before for before, after in pairwise(routers.times())]
    assert gaps[0] == pytest.approx(0.1, rel=0.2)
    assert gaps[1] == pytest.approx(0.2, rel=0.2)
    assert all(gap == pytest.approx(1.0, rel=0.11) for gap in gaps[5:])


async def test_only_changes_are_logged(autojump_clock: MockClock) -> None:
    routers = Routers()
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reporter(routers).run)
            for answer in (Done(), DOWN, Refusal(403, None, "no"), Done()):
                routers.answers[ROUTER] = answer
                await trio.sleep(5)
            nursery.cancel_scope.cancel()
    assert [(line["outcome"], line["log_level"]) for line in lines] == [
        ("accepted", "info"),
        ("unreachable", "warning"),
        ("refused with 403", "warning"),
        ("accepted", "info"),
    ]
    assert all(line["router"] == ROUTER for line in lines)


async def test_a_nudge_reports_at_once(autojump_clock: MockClock) -> None:
    routers = Routers()
    made = reporter(routers, ROUTER, OTHER_ROUTER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.sleep(0.4)
        made.nudge()
        await trio.sleep(1.5)
        nursery.cancel_scope.cancel()
    assert routers.times() == routers.times(OTHER_ROUTER) == pytest.approx([0.0, 0.4, 1.4])


async def test_a_nudge_while_a_report_is_on_its_way_is_not_lost(autojump_clock: MockClock) -> None:
    routers = Routers()
    routers.delay_s = 0.3
    made = reporter(routers)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.sleep(0.1)
        made.nudge()
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    assert routers.times() == pytest.approx([0.0, 0.3])


async def test_a_storm_of_nudges_is_bounded(autojump_clock: MockClock) -> None:
    routers = Routers()
    made = reporter(routers)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        for _ in range(1000):
            await trio.sleep(0.001)
            made.nudge()
        nursery.cancel_scope.cancel()
    assert 15 <= len(routers.reports) <= 1 / GAP_S + 1
