"""How a run is told to people: a failing seed with all that replays it, and the table over many."""

import json
from collections import Counter
from collections.abc import Sequence

import msgspec

from tests.sim.world import WORDS, Outcome


def failure(outcome: Outcome) -> str:
    """The seed, the options and the last 200 lines of the trace: the same seed replays to the same hash."""
    options = json.dumps(msgspec.to_builtins(outcome.options))
    return "\n".join(
        (
            f"seed {outcome.options.seed}: {WORDS[outcome.kind]}: {outcome.text}",
            f"options: {options}",
            f"injected: {outcome.injected}",
            f"ends: {outcome.ends}",
            "last lines of the trace:",
            *outcome.lines,
            f"replay: scripts/simulate --seed {outcome.options.seed}    (trace {outcome.trace_hash})",
        )
    )


class Tally:
    """Sums over many seeds."""

    def __init__(self) -> None:
        self.seeds = 0
        self.rounds = 0
        self.virtual_s = 0.0
        self.injected: Counter[str] = Counter()
        self.runs_with: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.failed: list[int] = []

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.rounds += outcome.rounds
        self.virtual_s += outcome.virtual_s
        self.injected.update(outcome.injected)
        self.runs_with.update(outcome.injected.keys())
        self.ends.update(outcome.ends)
        if outcome.kind:
            self.failed.append(outcome.options.seed)

    def rows(self, names: Sequence[str]) -> list[tuple[str, str, str]]:
        """Each class of faults: how often it struck, in how many runs."""
        return [(name, str(self.injected[name]), str(self.runs_with[name])) for name in names]
