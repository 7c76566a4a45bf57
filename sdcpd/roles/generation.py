"""What the front door asks of the router: one prompt in, pages of committed tokens out (draft 6.7; torch-free).

Theory: the front end (floor 5) knows text and the client's protocol, the router (floor 4) knows sessions. Between
them stand only the values below. A *generation* is one session seen from the client's side: it starts when the block
of `generation()` is entered and it ends with its final page. Whoever leaves the block earlier abandons the session,
and the router cancels it at its verifier at once (decision 37): that is how disconnects, stop strings and time-outs
free what they held. Tokens reach this interface only after they are durable in the commit log (6.7).
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final, Literal, Protocol

from msgspec import Struct

from sdcpd.drafting.traffic_class import RequestFacts
from sdcpd.protocol.messages import Output

STOP_TOKENS_LIMIT: Final = 1024
"""Stop tokens of one request: the array cap of `contract.stop`."""

RefusalReason = Literal["unknown_model", "context_length", "overloaded", "not_ready", "invalid"]


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """One prompt to continue.

    `max_new` None means as many tokens as the context holds behind the prompt, and at most what the router's settings
    allow to a request that names no limit. `stop` goes into the contract as it
    stands: each id ends the output and is its last token. `speculation` False asks for decoding without a drafter
    (decision 110).

    Temperature 0 is greedy, rule 1. Above it `top_k` (0: off) and `top_p_milli` (1000: off) apply; without a `seed` by
    rule 2, with one by rule 65281, under which the text is a function of prompt, profile and seed (decision 115).
    `rule` overrides the choice between the two: rule 2 with a seed has its draws fixed, but not its text.

    `logprobs` k (0 to 20) asks for each token's log-probability and those of the k likeliest in its place: then each
    page has `logprobs`, one entry a token, which `protocol.logprobs.unpack_entry` opens (decision 114).

    `m_max` bounds the length of proposals below what the model's ladder says. `traffic_class` asks for a traffic class
    by name; without one `facts`, model, temperature and group decide. `scope`, 16 octets, keeps what is cached and
    learned of it apart from sessions of other scopes (draft 4.1); `group` is whose it is, in the operator's words.
    """

    model: str
    prompt: tuple[int, ...]
    max_new: int | None
    stop: tuple[int, ...]
    speculation: bool = True
    temperature_milli: int = 0
    top_k: int = 0
    top_p_milli: int = 1000
    seed: int | None = None
    rule: int | None = None
    logprobs: int | None = None
    m_max: int | None = None
    traffic_class: str | None = None
    scope: bytes | None = None
    group: str | None = None
    facts: RequestFacts = RequestFacts()


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that clients may name. `ready`: a live verifier runs it now; before, the sizes may still be 0."""

    name: str
    context_tokens: int
    vocabulary: int
    ready: bool


class Passage(Struct, frozen=True, kw_only=True):
    """What became of a session on its way, for a client that asks: how often it went on at another verifier or another
    life of the same one, and with another drafter."""

    failovers: int = 0
    drafter_switches: int = 0


class GenerationRefused(Exception):
    """The request was not begun: no session exists for it. Raised on entering the block of `generation()`.

    `unknown_model`, `context_length` (prompt, or prompt and max_new, beyond the context) and `invalid` (for example
    an empty prompt or an id outside the vocabulary) are the caller's doing and name the parameter; `overloaded` and
    `not_ready` are worth a retry after `retry_after_s`. `detail` is one sentence for the client, without texts or
    tokens of the request.
    """

    def __init__(
        self, reason: RefusalReason, detail: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(detail)
        self.reason: Final = reason
        self.detail: Final = detail
        self.param: Final = param
        self.retry_after_s: Final = retry_after_s


class Generation(Protocol):
    """A running generation."""

    @property
    def session(self) -> bytes:
        """The session identifier, 16 octets."""
        ...

    def passage(self) -> Passage:
        """As far as it is known now."""
        ...

    def pages(self) -> AsyncIterator[Output]:
        """Committed tokens in order, without gap or repeat, across failovers; to be iterated once, by one task.

        Each page continues the one before it (`from_` = tokens delivered so far) and is non-empty unless it is final.
        The last one has `final` True, `finish` FINISH or FAIL, on FAIL a `reason` code, and `stats` where known; the
        iterator then ends. A session that cannot go on for whatever cause (verifier lost for good, cancelled by an
        operator) ends with such a FAIL page; the iterator raises nothing but cancellation.
        """
        ...


class Generations(Protocol):
    """What roles/router.py offers to the front end."""

    def models(self) -> tuple[ModelCard, ...]:
        """All configured models, in configuration order. Cheap: a copy of what the router knows now."""
        ...

    def generation(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """`async with generations.generation(request) as generation:` one session for the length of the block.

        Entering raises GenerationRefused. Leaving before the final page cancels the session promptly and does not
        wait for that: the block's exit only marks it, the router's own task for the session does the rest.
        """
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now, and in words why not (empty when it could)."""
        ...
