"""What one pass of a model is asked and what it answers, as plain values (no torch here, so that roles may import it).

A *sequence* is one session's KV in the page pool, named by a handle. A *span* is a stretch of its tokens that one
pass runs. A round of M proposed tokens is the span [last committed token, x1..xM] with M+1 wanted rows: row 0 judges
x1 and row M gives the additional token. A prefill chunk is a span with no wanted rows.

How rows are judged travels with the span, so that a row of a whole vocabulary never leaves the device. Without a
*judge* the rows are argmaxes (rule 1). The random values of the others were drawn by the caller, before the pass.
"""

from msgspec import Struct

from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import CheckedRow, DraftRow
from sdcpd.protocol.draws import RoundDraws


class Drawn(Struct, frozen=True):
    """Each row answers the target's own draw from p, with the value of its place: rule 65281 (decision 115), and a
    round under rule 2 in which nothing is proposed. `uniforms` has one value in [0, 1) a row."""

    profile: Profile
    uniforms: tuple[float, ...]


class Weighed(Struct, frozen=True):
    """Rule 2 (draft 6.4): the span answers a+1 rows, the accepted tokens and the additional one.

    `rows` are q[1..M] for the span's tokens after its first; `draws` has M tests and M+1 values for the additional
    token.
    """

    profile: Profile
    rows: tuple[CheckedRow, ...]
    draws: RoundDraws


class Shelf:
    """Where a pass leaves the target rows of one span, to be judged later. Owned by whoever planned the span."""

    def __init__(self) -> None:
        self.logits: object = None  # the engine's own; None until the pass has run
        self.logprobs: int | None = None  # as the span asked


class Kept(Struct, frozen=True):
    """Rule 2 while the draft rows are still on their way: the pass puts its rows on the shelf and answers none. Once
    all draft rows are in hand and checked, `judge` takes it from there (6.3 step 5)."""

    shelf: Shelf


class Sampled(Struct, frozen=True):
    """A draft under rule 2: the span's one row answers a token drawn from what the profile leaves of it, and with it
    the row it was drawn from. The profile has a top-k; `uniform` in [0, 1) is the drafter's own."""

    profile: Profile
    uniform: float


class Told(Struct, frozen=True):
    """Nothing is judged: the rows are of known text, and tell the log-probabilities of the tokens that follow (114)."""

    tokens: tuple[int, ...]


Judge = Drawn | Weighed | Kept | Sampled | Told


class Span(Struct, frozen=True):
    """Tokens of one sequence to run in one pass.

    `start` is the position of `tokens[0]`; the KV before it is valid, what stands from there on is overwritten.
    Logits are wanted for the last `rows` tokens, 0 <= rows <= len(tokens). A judge of proposed tokens wants all. With
    `logprobs` each row also answers the log-probabilities of its token and of so many likeliest ones (decision 114).
    """

    sequence: int
    tokens: tuple[int, ...]
    start: int
    rows: int
    judge: Judge | None = None
    logprobs: int | None = None


class Row(Struct, frozen=True):
    """What one row of logits says.

    Under rule 1 `token` is the smallest id among those of maximal logit (draft 6.4, decision 68), and `margin` the best
    minus the second best logit, 0.0 on a tie. A judged row has the token that was drawn or accepted, and an infinite
    margin: nothing else was near. When `finite` is false some logit was NaN or +Inf, or all were -Inf: neither
    `token` nor `margin` means anything and the session must fail (nothing may be committed from it).

    `drafted` is the row of q from which a Sampled token was drawn, `logprobs` an entry of protocol/logprobs.py.
    """

    token: int
    margin: float
    finite: bool
    drafted: DraftRow | None = None
    logprobs: bytes | None = None


class EngineInfo(Struct, frozen=True):
    """What a loaded model is. Digests are decision 8's; `dtype`, `device` and `numerics` are the ones in effect, never
    "auto". `weights_bytes` is the memory that the weights take.
    """

    model: bytes
    tokenizer: bytes
    vocabulary: int
    context_tokens: int
    page_tokens: int
    pages: int
    dtype: str
    device: str
    quantization: str = "none"
    numerics: str = "fast"
    weights_bytes: int = 0

    @property
    def session_tokens(self) -> int:
        """Prompt and output of the longest session there is room for: in the context and in the page pool."""
        return min(self.context_tokens, self.pages * self.page_tokens)
