"""Order of start and stop."""

import pytest
import trio
import trio.testing

from sdcpd.node.stages import STAGE_STOP_LIMIT_S, Part, Stages


def part(name: str, events: list[str], start_s: float = 1.0, stop_s: float = 1.0) -> Part:
    async def run(*, task_status: trio.TaskStatus[str]) -> None:
        await trio.sleep(start_s)
        events.append(f"{name} serves")
        task_status.started(name.upper())
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(stop_s)
            events.append(f"{name} ended")

    return run


async def test_started_and_stopped_one_after_the_other(autojump_clock: trio.testing.MockClock) -> None:
    events: list[str] = []
    async with trio.open_nursery() as nursery:
        stages = Stages(nursery)
        for name in ("cache", "verifier", "router"):
            assert await stages.start(name, part(name, events)) == name.upper()
        for name in ("router", "client port", "verifier", "cache"):  # one of them was never started
            await stages.stop(name)
        assert not nursery.child_tasks
    assert events == [
        "cache serves",
        "verifier serves",
        "router serves",
        "router ended",
        "verifier ended",
        "cache ended",
    ]


async def test_a_start_that_fails_is_heard_where_it_was_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    async def refuse(*, task_status: trio.TaskStatus[None]) -> None:
        raise OSError("no such model")

    events: list[str] = []
    async with trio.open_nursery() as nursery:
        stages = Stages(nursery)
        await stages.start("cache", part("cache", events))
        with pytest.raises(OSError, match="no such model"):
            await stages.start("verifier", refuse)
        await stages.stop("verifier")
        await stages.stop("cache")
    assert events == ["cache serves", "cache ended"]


@pytest.mark.parametrize("error", [None, RuntimeError("broken")])
async def test_a_part_that_ends_by_itself_ends_the_node(
    error: Exception | None, autojump_clock: trio.testing.MockClock
) -> None:
    async def short(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep(1)
        if error:
            raise error

    with pytest.raises(ExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            await Stages(nursery).start("verifier", short)
            await trio.sleep_forever()
    (cause,) = raised.value.exceptions
    assert str(cause) == (str(error) if error else "verifier ended by itself")


async def test_a_part_that_hangs_does_not_keep_the_others(autojump_clock: trio.testing.MockClock) -> None:
    events: list[str] = []
    async with trio.open_nursery() as nursery:
        stages = Stages(nursery)
        await stages.start("cache", part("cache", events))
        await stages.start("verifier", part("verifier", events, stop_s=1000))
        began = trio.current_time()
        await stages.stop("verifier")
        await stages.stop("cache")
        assert trio.current_time() - began == pytest.approx(STAGE_STOP_LIMIT_S + 1)
        assert events[-1] == "cache ended"


@pytest.mark.parametrize(("answer_s", "took_s"), [(3, 3), (100, 8)])
async def test_a_part_may_be_asked_to_end_by_itself(
    answer_s: float, took_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    asked = trio.Event()

    async def port(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await asked.wait()
        await trio.sleep(answer_s)

    async with trio.open_nursery() as nursery:
        stages = Stages(nursery)
        await stages.start("client port", port)
        began = trio.current_time()
        await stages.stop("client port", ask=asked.set, grace_s=8)
        assert trio.current_time() - began == pytest.approx(took_s)


async def test_a_start_can_be_given_up(autojump_clock: trio.testing.MockClock) -> None:
    events: list[str] = []
    async with trio.open_nursery() as nursery:
        stages = Stages(nursery)
        await stages.start("cache", part("cache", events))
        with trio.move_on_after(5):
            await stages.start("verifier", part("verifier", events, start_s=100))
        await stages.stop("verifier")
        await stages.stop("cache")
    assert events == ["cache serves", "cache ended"]
