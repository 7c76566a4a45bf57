"""Requests of the OpenAI API for chat and text completions, read into one plain value.

Which fields there are: the Structs below are the honoured ones, the tables in fields.py the known ones that must be
neutral, all others are refused. `temperature` is 0 when absent: decoding is greedy, and `top_p`, `top_k`, `min_p` and
`seed`, which cannot move an argmax, are accepted within their ranges. Above 0 the answer is sampled under `top_k` (0
and -1: off) and `top_p`, in thousandths; `min_p` must then be 0. With a `seed` the same request has the same answer,
however it is drafted and batched; negative seeds count modulo 2^64. `stop_token_ids`, `ignore_eos`, `top_k`, `min_p`,
`chat_template_kwargs` and `return_token_ids` (`token_ids` in each choice) are extensions known from vLLM. Our own is
`speculation` (speculation.py). `user` and `metadata` choose a traffic class, where the operator has set one up; they
change how fast an answer comes, never the answer.

A request may ask for several answers: `n` choices of each prompt, and for text completions several prompts. Choice c
of a request with a seed has its own, derived from it; choice 0 has the request's, so that it is what `n` = 1 gives.

`max_tokens` absent means 16 for text completions, as in the OpenAI API (less if the context ends earlier), and what
the context holds for chat.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from sdcpd.drafting.traffic_class import RequestFacts
from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.duplicates import refuse_duplicates
from sdcpd.frontend.errors import ApiError, context_length_exceeded, invalid, unsupported
from sdcpd.frontend.fields import CHAT, COMPLETION, STREAM_OPTIONS, read_fields
from sdcpd.frontend.messages import read_messages
from sdcpd.frontend.speculation import SpeculationWish, read_speculation
from sdcpd.protocol.terms import LOGPROBS_LIMIT, TOKEN_LIMIT
from sdcpd.roles.generation import STOP_TOKENS_LIMIT

COMPLETION_MAX_TOKENS: Final = 16
CHOICES_LIMIT: Final = 128
"""Answers of one request, over all its prompts; as many as the OpenAI API gives."""

STOP_STRINGS_LIMIT: Final = 4
STOP_STRING_CHARS_LIMIT: Final = 4096
"""Held-back text is at most this long; longer stop strings are a mistake."""

MetadataName = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
"""The limits of the OpenAI API, 16 pairs at most."""

UnitInterval = Annotated[float, Meta(ge=0, le=1)]


class _StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class _Common(Struct, frozen=True, kw_only=True):
    """Honoured in both kinds of completion. None is absent."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: UnitInterval | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: UnitInterval | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_LIMIT)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    speculation: str | dict[str, object] | None = None
    user: str | None = None
    metadata: Annotated[dict[MetadataName, MetadataValue], Meta(max_length=16)] | None = None


class _ChatRequest(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, object]]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_LIMIT)] | None = None
    chat_template_kwargs: dict[str, object] | None = None


class _CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: str | list[object]
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_LIMIT)] | None = None


class Conversation(Struct, frozen=True):
    """A chat's messages and the caller's template variables."""

    messages: tuple[ChatMessage, ...]
    variables: dict[str, object]


Source = Conversation | str | tuple[int, ...]
"""Where a prompt comes from: messages, text or tokens."""


class SamplingWish(Struct, frozen=True, kw_only=True):
    """How to choose tokens, in the units of a generation request. Temperature 0: greedy, whatever the rest says.

    `seed` is the caller's, and may be negative; draws.choice_seed makes of it that of each choice."""

    temperature_milli: int = 0
    top_k: int = 0
    top_p_milli: int = 1000
    seed: int | None = None


class Ask(Struct, frozen=True, kw_only=True):
    """A request with nothing left to check but what needs the model: its template, tokens and context.

    `max_new` None: `default_max_new` if that is given, else what the context holds. `max_new_param` is the name under
    which the caller gave `max_new`. `logprobs` None: none; else how many alternatives are told beside each token's own.
    `facts`: `user` and `metadata`, by which a traffic class may take the request.
    """

    model: str
    sources: tuple[Source, ...]
    n: int = 1
    max_new: int | None
    max_new_param: str = "max_tokens"
    default_max_new: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculation: SpeculationWish = SpeculationWish()
    sampling: SamplingWish = SamplingWish()
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    facts: RequestFacts = RequestFacts()

    @property
    def source_param(self) -> str:
        """The field the prompt came in."""
        return "messages" if isinstance(self.sources[0], Conversation) else "prompt"


def read_chat(body: bytes) -> Ask:
    """A body of POST /v1/chat/completions. Raises ApiError."""
    request = read_fields(read_object(body), _ChatRequest, CHAT)
    max_new, param = request.max_tokens, "max_tokens"
    if request.max_completion_tokens is not None:
        param = "max_completion_tokens"
        if max_new is not None and max_new != request.max_completion_tokens:
            raise invalid(param, "max_tokens and max_completion_tokens differ; send one of them")
        max_new = request.max_completion_tokens
    source = Conversation(read_messages(request.messages), request.chat_template_kwargs or {})
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs is allowed only with logprobs: true")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _ask(request, (source,), max_new, param, None, logprobs)


def read_completion(body: bytes) -> Ask:
    """A body of POST /v1/completions. Raises ApiError."""
    request = read_fields(read_object(body), _CompletionRequest, COMPLETION)
    return _ask(
        request,
        _read_prompts(request.prompt),
        request.max_tokens,
        "max_tokens",
        COMPLETION_MAX_TOKENS,
        request.logprobs,
    )


def new_tokens(ask: Ask, prompt_tokens: int, context_tokens: int) -> int | None:
    """`max_new` of the generation: a number that fits behind the prompt, or None for all that fits.

    Raises ApiError for a prompt that is empty or leaves no room, and for more tokens than there is room.
    """
    param = ask.source_param
    if prompt_tokens == 0:
        raise invalid(param, f"{param} has no tokens; there is nothing to continue")
    left = context_tokens - prompt_tokens
    if left < 1:
        raise context_length_exceeded(
            param,
            f"the model's context is {context_tokens} tokens and the prompt has {prompt_tokens}; shorten the prompt "
            "so that at least 1 token is left for the answer",
        )
    if ask.max_new is None:
        return None if ask.default_max_new is None else min(ask.default_max_new, left)
    if ask.max_new > left:
        raise context_length_exceeded(
            ask.max_new_param,
            f"the model's context is {context_tokens} tokens: the prompt has {prompt_tokens} and {ask.max_new_param} "
            f"asks for more than the {left} that are left",
        )
    return ask.max_new


def _ask(
    request: _Common,
    sources: tuple[Source, ...],
    max_new: int | None,
    max_new_param: str,
    default_max_new: int | None,
    logprobs: int | None,
) -> Ask:
    options = read_fields(request.stream_options or {}, _StreamOptions, STREAM_OPTIONS, "stream_options.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is allowed only with stream: true")
    n = request.n or 1
    if n * len(sources) > CHOICES_LIMIT:
        raise invalid("n", f"n: {len(sources)} prompts with {n} choices each are more than {CHOICES_LIMIT} answers")
    metadata = tuple((request.metadata or {}).items())
    return Ask(
        model=request.model,
        sources=sources,
        n=n,
        max_new=max_new,
        max_new_param=max_new_param,
        default_max_new=default_max_new,
        stop_strings=_read_stop(request.stop),
        stop_tokens=_read_stop_tokens(request.stop_token_ids or []),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        speculation=read_speculation(request.speculation),
        sampling=_read_sampling(request),
        return_token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        facts=RequestFacts(user=request.user, metadata=metadata),
    )


def _read_sampling(request: _Common) -> SamplingWish:
    if not request.temperature:
        return SamplingWish()
    if request.min_p:
        raise unsupported("min_p", "min_p: not supported above temperature 0; send 0 or leave it out")
    return SamplingWish(
        temperature_milli=max(1, round(1000 * request.temperature)),  # 0 would be greedy, which was not asked for
        top_k=max(0, request.top_k or 0),
        top_p_milli=1000 if request.top_p is None else round(1000 * request.top_p),
        seed=request.seed,
    )


def read_object(body: bytes) -> dict[str, object]:
    """The body's JSON object. Each value is decoded by itself, so that what is wrong in it is blamed on its field."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}", code="invalid_json") from error
    values = {name: _read_value(name, raw) for name, raw in fields.items()}
    refuse_duplicates(body)
    return values


def _read_value(name: str, raw: msgspec.Raw) -> object:
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(name[:128], f"{name[:128]}: {text}", "invalid_value") from error
    return value


def _read_prompts(prompt: str | list[object]) -> tuple[str | tuple[int, ...], ...]:
    """One prompt as text or tokens, or a list of several of either kind."""
    if isinstance(prompt, str):
        return (prompt,)
    if not any(isinstance(item, str | list) for item in prompt):
        return (read_tokens("prompt", prompt),)
    if len(prompt) > CHOICES_LIMIT:
        raise invalid("prompt", f"prompt: {len(prompt)} prompts are more than {CHOICES_LIMIT}")
    found: list[str | tuple[int, ...]] = []
    for index, item in enumerate(prompt):
        param = f"prompt[{index}]"
        if not isinstance(item, str | list):
            raise invalid(param, f"{param}: a list of prompts holds texts or lists of token ids", "invalid_value")
        found.append(item if isinstance(item, str) else read_tokens(param, item))
    return tuple(found)


def read_tokens(param: str, values: list[object]) -> tuple[int, ...]:
    """A list of token ids, of any vocabulary. Raises ApiError."""
    try:
        return msgspec.convert(values, tuple[Annotated[int, Meta(ge=0, lt=TOKEN_LIMIT)], ...])
    except msgspec.ValidationError as error:
        raise invalid(param, f"{param}: not a list of token ids: {error}", "invalid_value") from error


def _read_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > STOP_STRINGS_LIMIT:
        raise invalid("stop", f"stop: at most {STOP_STRINGS_LIMIT} strings")
    if not all(stops):
        raise invalid("stop", "stop: an empty string would end every answer before it begins")
    if any(len(text) > STOP_STRING_CHARS_LIMIT for text in stops):
        raise invalid("stop", f"stop: a string is longer than {STOP_STRING_CHARS_LIMIT} characters")
    return stops


def _read_stop_tokens(values: list[int]) -> tuple[int, ...]:
    tokens = tuple(sorted(set(read_tokens("stop_token_ids", list(values)))))
    if len(tokens) > STOP_TOKENS_LIMIT // 2:  # the model's own stop tokens need room in the contract too
        raise invalid("stop_token_ids", f"stop_token_ids: at most {STOP_TOKENS_LIMIT // 2} ids")
    return tokens
