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
