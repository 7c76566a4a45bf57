"""Whether a fault strikes now: one stream of chance for each class, so that one class does not shift another."""

import random
from collections import Counter
from collections.abc import Mapping


class Injector:
    """`rates` of the classes that are on; `injected` counts what was done. Nothing strikes once `over` is set."""

    def __init__(self, seed: int, rates: Mapping[str, float]) -> None:
        self.rates = rates
        self.injected: Counter[str] = Counter()
        self.over = False
        self._chances = {name: random.Random(f"{seed} fault {name}") for name in rates}

    def strikes(self, name: str) -> bool:
        """One chance for a class whose rate is a probability."""
        if self.over or name not in self.rates:
            return False
        struck = self._chances[name].random() < self.rates[name]
        if struck:
            self.injected[name] += 1
        return struck

    def wait_s(self, name: str) -> float:
        """How long until the next of a class whose rate is per second."""
        return self._chances[name].expovariate(self.rates[name])

    def chance(self, name: str) -> random.Random:
        """For what a fault of the class needs to be told besides: which node, how long."""
        return self._chances[name]

    def note(self, name: str) -> None:
        """A fault was injected."""
        self.injected[name] += 1

    def any(self, *names: str) -> bool:
        """Whether one of these was injected so far."""
        return any(self.injected[name] for name in names)
