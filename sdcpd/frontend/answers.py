"""Answers of the OpenAI API, as JSON octets: whole bodies and the chunks of a stream.

A shape knows one answer's identity (id, created, model) and writes it in one of the two kinds. In a stream, when usage
was asked for, every chunk has `usage: null` and one more chunk without choices carries it, as the API prescribes.

What speculation did, if that was asked for, rides beside it as `metrics.speculative_decoding`: the shape known from
vLLM, plus `num_rounds` (rounds with and without a draft), `num_self_decoded_tokens` (of rounds without one),
`drafter_switches` and `failovers`. Figures of several choices are added up. A choice that a stop string cut ends before
its verifier tells them: it is left out there, and the details of `usage` that would need it are then absent.
"""

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from sdcpd.frontend.logprobs import ChatLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from sdcpd.frontend.reply import Delta
from sdcpd.protocol.messages import SpeculationStats
from sdcpd.roles.generation import ModelCard, Passage

FinishReason = Literal["stop", "length"]


class ChoiceFigures(Struct, frozen=True, kw_only=True):
    """What one choice came to. `stats` None: it ended here before its verifier told them."""

    completion_tokens: int
    stats: SpeculationStats | None
    passage: Passage


class _CompletionTokensDetails(Struct, frozen=True):
    """Drafted tokens that the target kept, and that it did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class _PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of the prompts as tokenized, each once, and of the choices up to those that ended them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: _CompletionTokensDetails | UnsetType = UNSET


class _SpeculativeDecoding(Struct, frozen=True):
    num_rounds: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None  # null where no round had a draft
    draft_acceptance_rate: float | None
    acceptance_histogram: tuple[int, ...]
    num_self_decoded_tokens: int
    drafter_switches: int
    failovers: int


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
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class _ChatChunkChoice(Struct, frozen=True):
    delta: _ChatDelta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class _TextChoice(Struct, frozen=True):
    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class _Body(Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_ChatChoice | _ChatChunkChoice | _TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


class Finished(Struct, frozen=True):
    """A choice of an answer that is not streamed."""

    delta: Delta
    finish: FinishReason


class Shape(Protocol):
    """Writes one answer. All methods return JSON. `index` is the choice's."""

    def whole(self, choices: Sequence[Finished], usage: Usage, metrics: Metrics | None) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def first(self, index: int) -> bytes | None:
        """The chunk that opens a choice in a stream, if the kind has one."""
        ...

    def piece(self, index: int, delta: Delta) -> bytes:
        """A chunk of text."""
        ...

    def last(self, index: int, finish: FinishReason) -> bytes:
        """The chunk that says how a choice ended."""
        ...

    def usage(self, usage: Usage, metrics: Metrics | None) -> bytes:
        """The chunk after all choices, if usage was asked for."""
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

    def whole(self, choices: Sequence[Finished], usage: Usage, metrics: Metrics | None) -> bytes:
        written = tuple(
            _ChatChoice(
                _ChatMessage(choice.delta.text),
                choice.finish,
                index,
                chat_logprobs(choice.delta.logprobs),
                _ids(choice.delta),
            )
            for index, choice in enumerate(choices)
        )
        return self._encode(self.kind, written, usage, metrics)

    def first(self, index: int) -> bytes | None:
        return self._chunk(_ChatChunkChoice(_ChatDelta(role="assistant", content=""), index=index))

    def piece(self, index: int, delta: Delta) -> bytes:
        return self._chunk(
            _ChatChunkChoice(
                _ChatDelta(content=delta.text),
                index=index,
                logprobs=chat_logprobs(delta.logprobs),
                token_ids=_ids(delta),
            )
        )

    def last(self, index: int, finish: FinishReason) -> bytes:
        return self._chunk(_ChatChunkChoice(_ChatDelta(), finish, index))


class TextShape(_Writer):
    """POST /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def whole(self, choices: Sequence[Finished], usage: Usage, metrics: Metrics | None) -> bytes:
        written = tuple(
            _TextChoice(
                choice.delta.text, choice.finish, index, text_logprobs(choice.delta.logprobs), _ids(choice.delta)
            )
            for index, choice in enumerate(choices)
        )
        return self._encode(self.kind, written, usage, metrics)

    def first(self, index: int) -> bytes | None:  # noqa: ARG002  # nothing goes before text
        return None

    def piece(self, index: int, delta: Delta) -> bytes:
        return self._chunk(
            _TextChoice(delta.text, index=index, logprobs=text_logprobs(delta.logprobs), token_ids=_ids(delta))
        )

    def last(self, index: int, finish: FinishReason) -> bytes:
        return self._chunk(_TextChoice("", finish, index))


def _ids(delta: Delta) -> tuple[int, ...] | UnsetType:
    return UNSET if delta.tokens is None else delta.tokens


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


def usage_of(prompt_tokens: int, figures: Sequence[ChoiceFigures], choices: int = 1) -> Usage:
    """Counts as the API names them. `choices` of each prompt; what the first found cached counts for the prompt."""
    completion_tokens = sum(choice.completion_tokens for choice in figures)
    known = [choice.stats for choice in figures if choice.stats is not None]
    firsts = [choice.stats for choice in figures[::choices]]
    cached = sum(stats.cached_tokens for stats in firsts if stats is not None)
    accepted = sum(stats.accepted_tokens for stats in known)
    rejected = sum(stats.draft_tokens for stats in known) - accepted
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        UNSET if None in firsts else _PromptTokensDetails(cached),
        _CompletionTokensDetails(accepted, rejected) if len(known) == len(figures) else UNSET,
    )


def metrics_of(figures: Sequence[ChoiceFigures]) -> Metrics | None:
    """The sessions' statistics in the shape clients know; None where there are none."""
    known = [choice.stats for choice in figures if choice.stats is not None]
    if not known:
        return None
    rounds, drafts = sum(stats.rounds for stats in known), sum(stats.drafts for stats in known)
    draft_tokens = sum(stats.draft_tokens for stats in known)
    accepted = sum(stats.accepted_tokens for stats in known)
    longest = max(len(stats.accepted_histogram) for stats in known)
    return Metrics(
        _SpeculativeDecoding(
            num_rounds=rounds,
            num_spec_steps=drafts,
            num_draft_tokens=draft_tokens,
            num_accepted_draft_tokens=accepted,
            mean_acceptance_length=1 + accepted / drafts if drafts else None,
            draft_acceptance_rate=accepted / draft_tokens if draft_tokens else None,
            acceptance_histogram=tuple(
                sum(stats.accepted_histogram[length] for stats in known if length < len(stats.accepted_histogram))
                for length in range(longest)
            ),
            num_self_decoded_tokens=rounds - drafts,
            drafter_switches=sum(choice.passage.drafter_switches for choice in figures),
            failovers=sum(choice.passage.failovers for choice in figures),
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
