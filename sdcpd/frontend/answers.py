"""Answers of the OpenAI API, as JSON octets: whole bodies and the chunks of a stream.

A shape knows one answer's identity (id, created, model) and writes it in one of the two kinds. In a stream, when usage
was asked for, every chunk has `usage: null` and one more chunk without choices carries it, as the API prescribes.
What speculation did rides beside it as `metrics.speculative_decoding`, in the shape known from vLLM plus `num_rounds`
(rounds with and without a draft); it is absent where the generation was cut before its final page.
"""

from typing import Final, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from sdcpd.protocol.messages import SpeculationStats
from sdcpd.roles.generation import ModelCard

FinishReason = Literal["stop", "length"]


class _CompletionTokensDetails(Struct, frozen=True):
    """Predictions here are the request field `prediction`, which is not served; speculation is counted elsewhere."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of the prompt as tokenized, and of the answer up to the one that ended it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: _CompletionTokensDetails = _CompletionTokensDetails()


class _SpeculativeDecoding(Struct, frozen=True):
    num_rounds: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None  # null where no round had a draft
    draft_acceptance_rate: float | None
    acceptance_histogram: tuple[int, ...]


class Metrics(Struct, frozen=True):
    """Beside `usage`; an extension."""

    speculative_decoding: _SpeculativeDecoding


class _ChatMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class _ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatChoice(Struct, frozen=True):
    message: _ChatMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class _ChatChunkChoice(Struct, frozen=True):
    delta: _ChatDelta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class _TextChoice(Struct, frozen=True):
    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class _Body(Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_ChatChoice | _ChatChunkChoice | _TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


class Shape(Protocol):
    """Writes one answer. All methods return JSON."""

    def whole(self, text: str, finish: FinishReason, usage: Usage, metrics: Metrics | None) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def first(self) -> bytes | None:
        """The chunk that opens a stream, if the kind has one."""
        ...

    def piece(self, text: str) -> bytes:
        """A chunk of text."""
        ...

    def last(self, finish: FinishReason) -> bytes:
        """The chunk that says how the answer ended."""
        ...

    def usage(self, usage: Usage, metrics: Metrics | None) -> bytes:
        """The chunk after that, if usage was asked for."""
        ...


class _Writer:
    """What both kinds share."""

    kind: str
    chunk_kind: str

    def __init__(self, answer_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._id: Final = answer_id
        self._created: Final = created
        self._model: Final = model
        self._chunk_usage: Final = None if include_usage else UNSET

    def usage(self, usage: Usage, metrics: Metrics | None) -> bytes:
        return self._encode(self.chunk_kind, (), usage, metrics)

    def _chunk(self, choice: _ChatChunkChoice | _TextChoice) -> bytes:
        return self._encode(self.chunk_kind, (choice,), self._chunk_usage, None)

    def _encode(
        self,
        kind: str,
        choices: tuple[_ChatChoice | _ChatChunkChoice | _TextChoice, ...],
        usage: Usage | UnsetType | None,
        metrics: Metrics | None,
    ) -> bytes:
        return msgspec.json.encode(
            _Body(
                id=self._id,
                object=kind,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                metrics=metrics or UNSET,
            )
        )


class ChatShape(_Writer):
    """POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, text: str, finish: FinishReason, usage: Usage, metrics: Metrics | None) -> bytes:
        return self._encode(self.kind, (_ChatChoice(_ChatMessage(text), finish),), usage, metrics)

    def first(self) -> bytes | None:
        return self._chunk(_ChatChunkChoice(_ChatDelta(role="assistant", content="")))

    def piece(self, text: str) -> bytes:
        return self._chunk(_ChatChunkChoice(_ChatDelta(content=text)))

    def last(self, finish: FinishReason) -> bytes:
        return self._chunk(_ChatChunkChoice(_ChatDelta(), finish))


class TextShape(_Writer):
    """POST /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def whole(self, text: str, finish: FinishReason, usage: Usage, metrics: Metrics | None) -> bytes:
        return self._encode(self.kind, (_TextChoice(text, finish),), usage, metrics)

    def first(self) -> bytes | None:
        return None

    def piece(self, text: str) -> bytes:
        return self._chunk(_TextChoice(text))

    def last(self, finish: FinishReason) -> bytes:
        return self._chunk(_TextChoice("", finish))


class _Model(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int | None  # known from vLLM: the context in tokens; null until a verifier has told it
    ready: bool  # ours
    object: str = "model"
    owned_by: str = "sdcpd"


class _ModelList(Struct, frozen=True):
    data: tuple[_Model, ...]
    object: str = "list"


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Counts as the API names them."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def metrics_of(stats: SpeculationStats | None) -> Metrics | None:
    """The session's statistics in the shape clients know; None where there are none."""
    if stats is None:
        return None
    return Metrics(
        _SpeculativeDecoding(
            num_rounds=stats.rounds,
            num_spec_steps=stats.drafts,
            num_draft_tokens=stats.draft_tokens,
            num_accepted_draft_tokens=stats.accepted_tokens,
            mean_acceptance_length=1 + stats.accepted_tokens / stats.drafts if stats.drafts else None,
            draft_acceptance_rate=stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else None,
            acceptance_histogram=stats.accepted_histogram,
        )
    )


def model_body(card: ModelCard, created: int) -> bytes:
    """GET /v1/models/{id}."""
    return msgspec.json.encode(_model(card, created))


def model_list_body(cards: tuple[ModelCard, ...], created: int) -> bytes:
    """GET /v1/models."""
    return msgspec.json.encode(_ModelList(tuple(_model(card, created) for card in cards)))


def _model(card: ModelCard, created: int) -> _Model:
    return _Model(card.name, created, card.context_tokens or None, card.ready)
