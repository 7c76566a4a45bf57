"""What the checkers know of one session's sampling: profiles asked for and accepted, draft rows seen, what follows.

The profile of each round is recomputed from the contract, the policies that its verifier took (6.6) and the log, and
with it every token that can be: rule 65281's from the profile alone (115), rule 2's with a seed from the proposal, its
rows and the draws of that round (6.4). Without a seed a token must at least be possible.
"""

import struct
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.messages import Contract, ContractSampling, Policy, Proposal, Sampling
from tests.sim import oracle
from tests.sim.oracle import Sampled

SPECULATIVE, REPLAYABLE = 2, 0xFF01


class Wish:
    """What one client asked for: its rule, and the profiles it wanted, in order."""

    def __init__(self, rule: int, profile: Sampled) -> None:
        self.rule = rule
        self.profiles = [profile]


def complete(sampling: ContractSampling | Sampling | UnsetType) -> Sampled:
    """A profile of the wire with its defaults (decision 11)."""
    if isinstance(sampling, UnsetType):
        return Sampled()
    return Sampled(
        temperature_milli=1000 if sampling.temperature_milli is UNSET else sampling.temperature_milli,
        top_k=0 if sampling.top_k is UNSET else sampling.top_k,
        top_p_milli=1000 if sampling.top_p_milli is UNSET else sampling.top_p_milli,
        seed=None if sampling.seed is UNSET else sampling.seed,
    )


class SamplingBook:
    """`in_force` is the profile of the last round committed. `wish` is None for what no client of the run asked for.

    `rows` holds the contents that verifiers got for draft rows, by path.
    """

    def __init__(self, contract: Contract, session: bytes, wish: Wish | None) -> None:
        self.rule = contract.rule
        self.in_force = complete(contract.sampling)
        self.rows: dict[str, list[bytes]] = {}
        self._session = session
        self._wish = wish
        self._wished = 0  # of the wish's profiles the one that was in force last
        self._policies: dict[int, dict[int, Sampled]] = {}  # of each epoch, by from_round

    def accepted(self, epoch: int, policy: Policy) -> None:
        """A verifier took a policy."""
        self._policies.setdefault(epoch, {})[policy.from_round] = complete(policy.sampling)

    def fixed_text(self) -> Sampled | None:
        """The profile that the whole text follows from, None where it follows from more than that."""
        if self.rule == SPECULATIVE or (self._wish is not None and len(self._wish.profiles) > 1):
            return None
        return self.in_force if self.rule == REPLAYABLE else oracle.GREEDY

    def begins(self, record: CommitRecord, *, again: bool) -> str | None:
        """A round is committed: take the profile it was under. What is wrong with that, or None. `again` allows an
        older wish to return."""
        before = self.in_force
        due = [from_ for from_ in self._policies.get(record.epoch, {}) if from_ <= record.round]
        if due:
            self.in_force = self._policies[record.epoch][max(due)]
        told = None if record.ctl is UNSET or record.ctl.sampling is UNSET else complete(record.ctl.sampling)
        if told != (self.in_force if self.in_force != before else None):
            return f"50: round {record.round} says it is under {told}, where {self.in_force} follows {before}"
        if self._wish is None or self.rule not in (SPECULATIVE, REPLAYABLE):
            return None
        later = range(0 if again else self._wished, len(self._wish.profiles))
        place = next((place for place in later if self._wish.profiles[place] == self.in_force), None)
        if place is None:
            return (
                f"50: round {record.round} is under {self.in_force}, wanted was {self._wish.profiles[self._wished :]}"
            )
        self._wished = place
        return None

    def unfit(self, prefix: Sequence[int], record: CommitRecord) -> str | None:
        """Item 10 for tokens that follow from the profile alone, or None."""
        context = list(prefix)
        for place, token in enumerate(record.emitted):
            index = record.committed - len(record.emitted) + place + 1
            if self.rule == REPLAYABLE and token != oracle.replayed(context, index, self.in_force):
                return f"output {index} is not what is drawn there"
            if oracle.distribution(context, self.in_force)[token] == 0.0:
                return f"output {index} has no probability"
            context.append(token)
        return None

    def self_decoded(self, prefix: Sequence[int], record: CommitRecord) -> str | None:
        """Rule 2: a round of its own is M = 0 (69)."""
        if self.in_force.seed is None:
            return None
        _, token = oracle.judged(prefix, (), (), self.in_force, session=self._session, round_=record.round)
        return None if record.emitted == (token,) else "its token is not the one of the seed's draw"

    def drafted(
        self, prefix: Sequence[int], record: CommitRecord, proposal: Proposal, stop: Sequence[int], left: int
    ) -> str | None:
        """Rule 2: why this proposal does not give the round, or None."""
        assert record.ctl is not UNSET
        accepted = record.ctl.accepted
        assert accepted is not UNSET
        why = "none of its rows reached the verifier"
        for rows in self._rows(proposal):
            if self.in_force.seed is None:
                return None
            a, token = oracle.judged(
                prefix, proposal.tokens, rows, self.in_force, session=self._session, round_=record.round
            )
            emitted = _cut((*proposal.tokens[:a], token), stop, left)
            if emitted == record.emitted and (accepted == a or len(emitted) <= accepted < a):
                return None
            why = f"its draws give {emitted} of {a} accepted, not {record.emitted} of {accepted}"
        return why

    def _rows(self, proposal: Proposal) -> list[list[list[float]]]:
        """All that the verifier may have had for the rows of q: those inside, else the contents of the object."""
        width, count = oracle.VOCABULARY, len(proposal.tokens)
        if not isinstance(proposal.q, UnsetType):
            rows = []
            for row in proposal.q:
                values = [0.0] * width
                for token, value in zip(row.ids, struct.unpack(f"<{len(row.ids)}f", row.values), strict=True):
                    values[token] = value
                rows.append(values)
            return [rows] if len(rows) == count else []
        ref = proposal.q_rows if isinstance(proposal.q_rows, str) else ""
        contents = [one for path, found in self.rows.items() if ref.endswith(path) for one in found]
        flat = [struct.unpack(f"<{width * count}f", octets) for octets in contents if len(octets) == 4 * width * count]
        return [[list(one[width * place : width * (place + 1)]) for place in range(count)] for one in flat]


def _cut(tokens: tuple[int, ...], stop: Sequence[int], left: int) -> tuple[int, ...]:
    tokens = tokens[:left]
    ends = [place for place, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens
