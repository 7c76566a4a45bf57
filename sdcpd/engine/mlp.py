"""The second half of a layer: an ordinary gated MLP, or a mixture of them of which each token takes a few.

    ordinary:  down(silu(gate(x)) * up(x))
    mixture:   w = softmax(router(x)) in float32;  the sum of w[e] * expert[e](x) over the largest w

In a mixture an expert runs once a pass, over the tokens that chose it, and a token's sum goes up the experts' numbers.
So what a token gets does not depend on who else chose its experts. Among equal weights the smaller number is chosen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from sdcpd.engine.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`gate_up` [2 * intermediate, hidden] holds both projections, gate above up; `down` [hidden, intermediate]."""

    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.gate_up, self.down)

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        """sums + mlp(rows), all [T, hidden]."""
        return self.down.added_to(sums, self._between(rows))

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(self._between(rows))

    def _between(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up(rows).chunk(2, -1)
        return silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class Mixture:
    """`router` [experts, hidden]; each token takes `chosen` experts, their weights scaled to 1 if `normalised`."""

    router: Linear
    experts: tuple[GatedMlp, ...]
    chosen: int
    normalised: bool

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router, *(linear for expert in self.experts for linear in expert.linears))

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        """sums + mixture(rows), all [T, hidden]."""
        odds = torch.softmax(self.router(rows), -1, dtype=torch.float32)
        weights, chosen = odds.sort(stable=True, dim=-1, descending=True)
        weights, chosen = weights[:, : self.chosen], chosen[:, : self.chosen]
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(rows.dtype)
        mixed = torch.zeros_like(rows)
        for number in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == number)
            mixed.index_add_(0, tokens, self.experts[number](rows[tokens]).mul_(weights[tokens, places, None]))
        return sums + mixed
