"""A period in which the verifier makes rounds of one token by itself (draft 6.5.2; decisions 81, 103, 110)."""

from msgspec import UNSET

from sdcpd.protocol.escalation import may_self_decode
from sdcpd.protocol.messages import Contract


class Period:
    """One self-decoding period. An *ordered* one (decision 110) knows neither self_max nor self_load."""

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self.over = False
        self._tokens = 0

    def token_scored(self) -> None:
        self._tokens += 1

    def may_go_on(self, contract: Contract, load: int) -> bool:
        """Whether one more token is decoded. Load is checked before every token but the first (decision 81).

        Once the answer is no, the period is over and stays so.
        """
        if self.over:
            return False
        if self.ordered or self._tokens == 0:
            return True
        exhausted = contract.self_max is not UNSET and self._tokens >= contract.self_max
        self.over = exhausted or not may_self_decode(contract, load)
        return not self.over
