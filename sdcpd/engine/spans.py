"""What one pass of a model is asked and what it answers, as plain values (no torch here, so that roles may import it).

A *sequence* is one session's KV in the page pool, named by a handle. A *span* is a stretch of its tokens that one
pass runs. A round of M proposed tokens is the span [last committed token, x1..xM] with M+1 wanted rows: row 0 judges
x1 and row M gives the additional token. A prefill chunk is a span with no wanted rows.
"""

from msgspec import Struct


class Span(Struct, frozen=True):
    """Tokens of one sequence to run in one pass.

    `start` is the position of `tokens[0]`; the KV before it is valid, what stands from there on is overwritten.
    Logits are wanted for the last `rows` tokens, 0 <= rows <= len(tokens).
    """

    sequence: int
    tokens: tuple[int, ...]
    start: int
    rows: int


class Row(Struct, frozen=True):
    """What one row of logits says under rule 1.

    `token` is the smallest id among those of maximal logit (draft 6.4, decision 68). `margin` is the best minus the
    second best logit, 0.0 on a tie. When `finite` is false some logit was NaN or +Inf, or all were -Inf: neither
    `token` nor `margin` means anything and the session must fail (nothing may be committed from it).
    """

    token: int
    margin: float
    finite: bool


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
