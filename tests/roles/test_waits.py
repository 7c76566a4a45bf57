"""Waiting in roles."""

from typing import Any

import trio

from sdcpd.roles.waits import Alarm
from tests.support.ports import TrioClock


async def test_an_alarm_rings_when_its_moment_has_come_wherever_it_moved(autojump_clock: Any) -> None:
    rung: list[float] = []
    alarm = Alarm(TrioClock(), lambda: rung.append(trio.current_time() - begin))
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        alarm.set(begin + 7)
        nursery.start_soon(alarm.run)
        await trio.sleep(1)
        alarm.set(None)
        await trio.sleep(1)
        alarm.set(begin + 9)  # later than it sleeps: it looks again at 7
        await trio.sleep(8)
        assert rung == [9]
        alarm.set(begin + 60)
        await trio.sleep(1)
        alarm.set(begin + 15)  # nearer: it is woken
        await trio.sleep(10)
        assert rung == [9, 15]
        alarm.set(begin)  # long past
        await trio.sleep(1)
        assert rung == [9, 15, 21]
        alarm.set(begin + 30)
        alarm.set(None)
        await trio.sleep(100)
        assert rung == [9, 15, 21]
        nursery.cancel_scope.cancel()
