"""The choice of M (draft 6.2): how many tokens are worth proposing.

Theory. With alpha the chance that a proposed token is accepted given that those before it were, a round over M tokens
commits E(M) = (1 - alpha^(M+1)) / (1 - alpha) tokens on average (M + 1 for alpha = 1). It takes M * t_d to draft and
t_v to verify. The M within the limits with the largest E(M) / (M * t_d + t_v) is proposed.

Three estimates feed the rule, all exponentially weighted:

alpha, one session and one position. A verdict over M tokens with a accepted is a successes and, when a < M, one
failure; when a = M the next token was never judged, so nothing is said about it (the run is censored, not failed).
alpha is decayed successes over decayed trials. Drafts of one source differ much in quality and say so (Draft.matched):
a copy whose last 20 tokens all agreed goes on, one that agreed by a single token mostly does not. So alpha is kept per
class of `matched`, and each class starts at (matched + 1) / (matched + 2): the rule of succession for a run of that
many successes. A new edit task therefore proposes long drafts from its first good match on. Drafts that a model
computed are a class of their own. Within a class alpha differs by position: a model errs more the further it goes on
from its own guesses, and of a copy the opposite is true, whoever agreed for ten tokens will agree on the eleventh. So
each position has an estimate of its own, drawn towards that of its class, which decides while the position has seen
little; E(M) is then 1 + alpha_1 + alpha_1 * alpha_2 + ..., the draft's formula where all alphas are equal.

t_d, one drafter: time to draft, per token, looked up and computed ones apart; where the draft's rows must be written
before the proposal is sent, the time that takes by token is added (6.2: "including writing its artifacts at the cache
bandwidth currently available").

t_v, one verifier. The draft takes t_v as a constant. On a GPU with free capacity it is; on a CPU each further row
costs, and a source whose tokens are nearly free would then always propose the maximum. So t_v is fitted as a line in
M, t_v0 + M * t_row; the draft's rule is the case t_row = 0. The fit is a decayed least squares line through (M,
measured time), made robust in two ways: a measurement is pulled to within three mean residuals of the line before it
counts (a round that waited for a neighbour's prefill says nothing about rows), and the slope is drawn towards an
assumed share of the fixed cost, which decides while all M are alike.

All times are in seconds. Nothing here reads a clock: the role measures.
"""

from collections.abc import Callable

from msgspec import Struct

from sdcpd.drafting.settings import LengthSettings
from sdcpd.drafting.source import MODEL

MATCH_CLASSES = 7
CLASSES = MATCH_CLASSES + 1
"""Those by length of match, and the last one for drafts that a model computed."""
POSITIONS = 8
"""Positions of a proposal with an alpha of their own; the last stands for all after it."""
PRIOR_TRIALS = 2.0
"""Weight of a class's starting alpha, in trials: enough that one bad draw does not silence it, soon outweighed."""
MODEL_PRIOR = 0.75
"""Where a model's alpha starts: about what small models of a family reach on chat."""
POSITION_TRIALS = 8.0
"""Weight of its class in the alpha of a model's position."""
COPY_POSITION_TRIALS = 32.0
"""The same for copies, whose length of match says most of it: 8 cost 1 % of the tokens a second in the replay that
suffix_source.py tells of."""
SLOPE_PRIOR = 64.0
"""Weight of the assumed slope against the decayed scatter of M (tokens squared): half a session of M = 1 and 17."""
RESIDUALS_KEPT = 3.0


class Choice(Struct, frozen=True):
    """An M, the tokens that a round over it commits on average, and these by the second."""

    m: int
    tokens: float
    tokens_per_s: float


def expected_tokens(alpha: float, m: int) -> float:
    """Tokens committed on average by a round over m proposed tokens (6.2, after LEVIATHAN), 0 <= alpha <= 1."""
    if alpha >= 1.0:
        return m + 1.0
    return float((1.0 - alpha ** (m + 1)) / (1.0 - alpha))


def best_length(alpha: Callable[[int], float], limit: int, *, fixed_s: float, token_s: float) -> Choice:
    """The M in 1..limit with the most expected tokens a second, the smallest of equals.

    `alpha(i)` is the chance of position i >= 1 once those before it were accepted; `fixed_s` > 0 is what a round costs
    whatever M is, `token_s` >= 0 what each proposed token adds (t_d + t_row).
    """
    assert limit >= 1
    assert fixed_s > 0.0
    assert token_s >= 0.0
    best = Choice(m=1, tokens=1.0, tokens_per_s=0.0)
    tokens = reached = 1.0
    for m in range(1, limit + 1):
        reached *= alpha(m)
        tokens += reached
        rate = tokens / (fixed_s + m * token_s)
        if rate > best.tokens_per_s:
            best = Choice(m=m, tokens=tokens, tokens_per_s=rate)
    return best


class Acceptance:
    """alpha of one session, by class of draft and by position."""

    def __init__(self, settings: LengthSettings) -> None:
        self._keep = 1.0 - settings.ema_alpha
        self._successes = [[0.0] * POSITIONS for _ in range(CLASSES)]
        self._trials = [[0.0] * POSITIONS for _ in range(CLASSES)]

    def observe(self, matched: int, *, proposed: int, accepted: int) -> None:
        """One verdict over our own tokens; 0 <= accepted <= proposed."""
        assert 0 <= accepted <= proposed
        at = match_class(matched)
        successes, trials = self._successes[at], self._trials[at]
        for place in range(POSITIONS):
            successes[place] *= self._keep
            trials[place] *= self._keep
        for position in range(accepted + (accepted < proposed)):
            place = min(position, POSITIONS - 1)
            successes[place] += position < accepted
            trials[place] += 1.0

    def alpha(self, matched: int) -> float:
        """Of a class as a whole."""
        at = match_class(matched)
        prior = MODEL_PRIOR if matched == MODEL else (matched + 1.0) / (matched + 2.0)
        return (sum(self._successes[at]) + PRIOR_TRIALS * prior) / (sum(self._trials[at]) + PRIOR_TRIALS)

    def by_position(self, matched: int) -> Callable[[int], float]:
        """Of each position i >= 1 of a draft of this class."""
        at, whole = match_class(matched), self.alpha(matched)
        weight = POSITION_TRIALS if matched == MODEL else COPY_POSITION_TRIALS
        alphas = [
            (successes + weight * whole) / (trials + weight)
            for successes, trials in zip(self._successes[at], self._trials[at], strict=True)
        ]
        return lambda position: alphas[min(position, POSITIONS) - 1]


def match_class(matched: int) -> int:
    """0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more; MODEL is the last."""
    return MATCH_CLASSES if matched == MODEL else min(matched.bit_length(), MATCH_CLASSES - 1)


class VerifyTime:
    """t_v of one verifier as a line in M: seconds = fixed + m * per_token."""

    def __init__(self, settings: LengthSettings) -> None:
        self._rate = settings.cost_ema_alpha
        self._ratio = settings.row_cost_ratio
        self._weight = 0.0
        self._mean_m = 0.0
        self._mean_s = 0.0
        self._var_m = 0.0  # decayed sums over (m - mean_m)^2 and (m - mean_m)(s - mean_s)
        self._cov = 0.0
        self._residual_s = 0.0

    def observe(self, m: int, seconds: float) -> None:
        """A verdict over m tokens took this long. Pass only rounds that were sent once and answered at once."""
        if self._weight == 0.0:
            self._weight, self._mean_m, self._mean_s, self._residual_s = 1.0, float(m), seconds, seconds
            return
        fixed_s, token_s = self.line()
        residual = seconds - (fixed_s + m * token_s)
        bound = RESIDUALS_KEPT * self._residual_s
        seconds -= residual - max(-bound, min(bound, residual))
        # The scale follows what is seen, but a single monster moves it by no more than a tenfold residual would.
        self._residual_s += self._rate * (min(abs(residual), 10.0 * self._residual_s + 1e-9) - self._residual_s)
        keep = 1.0 - self._rate
        self._weight = keep * self._weight + 1.0
        d_m = m - self._mean_m
        d_s = seconds - self._mean_s
        self._mean_m += d_m / self._weight
        self._mean_s += d_s / self._weight
        self._var_m = keep * self._var_m + d_m * (m - self._mean_m)
        self._cov = keep * self._cov + d_m * (seconds - self._mean_s)

    def line(self) -> tuple[float, float]:
        """(t_v0, t_row) in seconds, t_v0 > 0 and t_row >= 0. Before any measurement: one second and its share."""
        if self._weight == 0.0:
            return 1.0, self._ratio
        assumed_s = self._ratio * self._mean_s / (1.0 + self._ratio * self._mean_m)
        token_s = max(0.0, (self._cov + SLOPE_PRIOR * assumed_s) / (self._var_m + SLOPE_PRIOR))
        # A steep line through few points may cross zero before M = 0; a round is never free.
        fixed_s = max(self._mean_s - token_s * self._mean_m, 0.1 * self._mean_s, 1e-9)
        return fixed_s, token_s


class LengthChooser:
    """The rule with its estimates: one for a drafter, one Acceptance a session, one VerifyTime a verifier."""

    def __init__(self, settings: LengthSettings) -> None:
        self._rate = settings.cost_ema_alpha
        self._draft_s: dict[bool, float] = {}  # computed by a model? -> seconds a token
        self._publish_s = 0.0

    def drafted(self, matched: int, tokens: int, seconds: float) -> None:
        """`tokens` of a draft of this class took `seconds`: t_d."""
        assert tokens >= 1
        model = matched == MODEL
        per_token_s = seconds / tokens
        known_s = self._draft_s.get(model, per_token_s)
        self._draft_s[model] = known_s + self._rate * (per_token_s - known_s)

    def published(self, tokens: int, seconds: float) -> None:
        """The rows of `tokens` were written to a cache in `seconds`."""
        assert tokens >= 1
        per_token_s = seconds / tokens
        known_s = self._publish_s or per_token_s
        self._publish_s = known_s + self._rate * (per_token_s - known_s)

    def choose(
        self, acceptance: Acceptance, verify: VerifyTime, *, matched: int, limit: int, publishes: bool = False
    ) -> Choice:
        """M for the next proposal, 1 <= M <= limit. `publishes`: its rows have to be written first."""
        fixed_s, token_s = verify.line()
        token_s += self._draft_s.get(matched == MODEL, 0.0) + (self._publish_s if publishes else 0.0)
        return best_length(acceptance.by_position(matched), limit, fixed_s=fixed_s, token_s=token_s)

    def rate(self, verify: VerifyTime, *, matched: int, m: int, tokens: float) -> float:
        """Tokens a second of a round over `m` drafted tokens of a class that commits `tokens` on average."""
        fixed_s, token_s = verify.line()
        return tokens / (fixed_s + m * (token_s + self._draft_s.get(matched == MODEL, 0.0)))
