"""What a drafter is worth: how often its best token is the target's, by family, and what its pass costs.

Prompts that were held out; the target's greedy answer to each; one pass of the drafter over both. A drafter pays when
(1 + a + ... + a^M) / (1 + M c) exceeds 1 for some M, with a the agreement and c its pass over the target's: an upper
bound, since it takes the target's pass over M+1 tokens for one over 1, and rounds for free.
"""

from pathlib import Path
from typing import Final

from sdcpd.engine.forward import Engine
from sdcpd.engine.spans import Span
from sdcpd.frontend.text import ModelText
from tests.bench.figures import Blocks, progress
from tests.bench.passes import Stopwatch
from tests.distil.texts import prompts_of

LONGEST_DRAFT: Final = 16
PASSES: Final = 12


def best_ratio(agreement: float, cost: float) -> tuple[float, int]:
    """The bound on the speed-up, and the M that reaches it; at least 1, with M 0: no drafting."""
    ratios = [(sum(agreement**place for place in range(m + 1)) / (1 + m * cost), m) for m in range(LONGEST_DRAFT + 1)]
    return max(ratios, key=lambda one: one[0])


def evaluate(
    target: Engine, drafter: Engine, text: ModelText, prompts: Path, *, each: int, longest: int, answer: int
) -> Blocks:
    """Figures `FAMILY.agreement`, `.bound`, `.m`, and `cost.ratio` (CPU time, taken in turns)."""
    blocks = Blocks()
    cost = _cost(target, drafter)
    blocks.add("cost", {"ratio": cost})
    for family, known in prompts_of(prompts, text, held_out=True).items():
        right = places = 0
        for prompt in [one for one in known if len(one) <= longest][:each]:
            said = greedy(target, prompt, text.stop, answer)
            guesses = teacher_forced(drafter, prompt, said)
            right += sum(guess == token for guess, token in zip(guesses, said, strict=True))
            places += len(said)
        if places:
            bound, m = best_ratio(right / places, cost)
            blocks.add(family, {"agreement": right / places, "places": places, "bound": bound, "m": m})
            progress(f"{family}: agreement {right / places:.3f} over {places} places")
    return blocks


def greedy(engine: Engine, prompt: tuple[int, ...], stop: tuple[int, ...], answer: int) -> list[int]:
    """Up to `answer` tokens, the stop token included."""
    sequence = engine.open_sequence()
    reserved = engine.reserve(sequence, len(prompt) + answer)
    assert reserved
    said: list[int] = []
    tokens, start = prompt, 0
    while len(said) < answer and (not said or said[-1] not in stop):
        ((row,),) = engine.run(engine.plan([Span(sequence, tokens, start, 1)]))
        start += len(tokens)
        said.append(row.token)
        tokens = (row.token,)
    engine.close_sequence(sequence)
    return said


def teacher_forced(engine: Engine, prompt: tuple[int, ...], said: list[int]) -> list[int]:
    """The engine's best token at each place of `said`, given what stands before."""
    sequence = engine.open_sequence()
    tokens = (*prompt, *said[:-1])
    reserved = engine.reserve(sequence, len(tokens))
    assert reserved
    (rows,) = engine.run(engine.plan([Span(sequence, tokens, 0, len(said))]))
    engine.close_sequence(sequence)
    return [row.token for row in rows]


def _cost(target: Engine, drafter: Engine) -> float:
    """CPU time of the drafter's pass over that of the target's; the least of each, taken in turns."""
    spent: dict[Engine, list[float]] = {target: [], drafter: []}
    sequences = {engine: engine.open_sequence() for engine in spent}
    for engine, sequence in sequences.items():
        reserved = engine.reserve(sequence, 64)
        assert reserved
        engine.run(engine.plan([Span(sequence, (0,) * 32, 0, 1)]))
    for _ in range(PASSES):
        for engine, sequence in sequences.items():
            with Stopwatch() as watch:
                engine.run(engine.plan([Span(sequence, (1,), 32, 1)]))
            spent[engine].append(watch.cpu_ms)
    for engine, sequence in sequences.items():
        engine.close_sequence(sequence)
    return min(spent[drafter]) / min(spent[target])
