"""What shares a pass (no torch)."""

from hypothesis import given
from hypothesis import strategies as st

from sdcpd.engine.scheduler import Prefill, Ready, choose
from sdcpd.engine.spans import Span


def rounds(*sizes: int) -> list[Ready]:
    return [
        Ready(key=bytes([n]), span=Span(sequence=n, tokens=(0,) * size, start=9, rows=size))
        for n, size in enumerate(sizes)
    ]


def prompts(*sizes: int) -> list[Prefill]:
    return [
        Prefill(key=bytes([100 + n]), sequence=100 + n, tokens=(0,) * size, start=0) for n, size in enumerate(sizes)
    ]


def test_every_ready_round_goes_along() -> None:
    mix = choose(rounds(5, 1, 9), [], budget_tokens=128, chunk_tokens=16, busy=True)
    assert [len(span.tokens) for span in mix.spans] == [5, 1, 9]
    assert mix.rows == 3, "one row a session: proposed rows are not load"


def test_prompts_get_a_chunk_while_anybody_is_past_theirs_and_all_otherwise() -> None:
    for ready in (rounds(5), []):
        mix = choose(ready, prompts(500), budget_tokens=128, chunk_tokens=16, busy=True)
        assert len(mix.prefills[0][1].tokens) == 16
    alone = choose([], prompts(100, 500), budget_tokens=128, chunk_tokens=16, busy=False)
    assert [len(span.tokens) for _, span in alone.prefills] == [100, 28]


def test_a_short_prompt_passes_a_long_one_which_goes_on() -> None:
    mix = choose([], prompts(5000, 700, 40), budget_tokens=128, chunk_tokens=64, busy=True)
    assert {key[0]: len(span.tokens) for key, span in mix.prefills} == {102: 32, 100: 32}
    mix = choose([], prompts(5000, 700, 10), budget_tokens=128, chunk_tokens=64, busy=True)
    assert {key[0]: len(span.tokens) for key, span in mix.prefills} == {102: 10, 101: 22, 100: 32}
    mix = choose([], prompts(10, 5000), budget_tokens=128, chunk_tokens=64, busy=True)
    assert {key[0]: len(span.tokens) for key, span in mix.prefills} == {100: 10, 101: 54}


def test_the_bound_on_how_long_a_round_waits() -> None:
    """The docstring's: W // (R - M + 1) + 1 passes, first come first served, for any sizes."""
    for budget in (128, 200, 1024):
        for sizes in ([9] * 60, [65, 1] * 30, [1] * 200, [33, 64, 2, 7, 65] * 12):
            waiting, passes, before = rounds(*sizes), 0, 0
            room, longest = budget - budget // 4, max(sizes)
            bounds = {}
            for one in waiting:
                bounds[one.span.sequence] = before // (room - longest + 1) + 1
                before += len(one.span.tokens)
            while waiting:
                passes += 1
                mix = choose(waiting, prompts(4000), budget_tokens=budget, chunk_tokens=64, busy=True)
                assert [one.key for one in mix.rounds] == [one.key for one in waiting[: len(mix.rounds)]]
                for one in mix.rounds:
                    assert passes <= bounds[one.span.sequence]
                waiting = waiting[len(mix.rounds) :]


def test_a_share_of_each_pass_is_kept_for_prompts() -> None:
    mix = choose(rounds(*([9] * 50)), prompts(500), budget_tokens=128, chunk_tokens=64, busy=True)
    assert sum(len(span.tokens) for _, span in mix.prefills) >= 32


@given(
    st.lists(st.integers(1, 65), max_size=20),
    st.lists(st.integers(1, 400), max_size=5),
    st.integers(128, 512),
    st.integers(16, 256),
    st.booleans(),
)
def test_within_budget_and_never_idle(
    sizes: list[int], lengths: list[int], budget: int, chunk: int, busy: bool
) -> None:
    busy = busy or bool(sizes)
    mix = choose(rounds(*sizes), prompts(*lengths), budget_tokens=budget, chunk_tokens=chunk, busy=busy)
    assert sum(len(span.tokens) for span in mix.spans) <= budget
    assert bool(mix.spans) == bool(sizes or lengths)
    assert len({span.sequence for span in mix.spans}) == len(mix.spans)
    if sizes:
        assert mix.rounds
    if lengths:
        assert mix.prefills
