"""Whether a request can be served, and by which verifier: found out before any session exists (bug 10)."""

from msgspec import UnsetType

from sdcpd.protocol.fleet import Instance
from sdcpd.protocol.terms import LOGPROBS_LIMIT
from sdcpd.roles.generation import STOP_TOKENS_LIMIT, GenerationRefused, GenerationRequest


def context_of(one: Instance) -> int | None:
    """Tokens that a session there may hold, if it says so."""
    context = one.status.context_tokens
    return None if isinstance(context, UnsetType) else context


def vocabulary_of(one: Instance) -> int | None:
    """Its token ids are below this, if it says so."""
    vocabulary = one.status.vocabulary
    return None if isinstance(vocabulary, UnsetType) else vocabulary


def check_tokens(request: GenerationRequest) -> None:
    """Refuse what no verifier could serve. Raises GenerationRefused."""
    if not request.prompt:
        raise GenerationRefused("invalid", "the prompt is empty; at least one token is needed", param="prompt")
    if min(request.prompt) < 0:
        raise GenerationRefused("invalid", "the prompt holds a negative token id", param="prompt")
    if request.max_new is not None and request.max_new < 0:
        raise GenerationRefused("invalid", "the number of new tokens is negative", param="max_tokens")
    if len(request.stop) > STOP_TOKENS_LIMIT or min(request.stop, default=0) < 0:
        detail = f"stop tokens must be ids of 0 and above, {STOP_TOKENS_LIMIT} at most"
        raise GenerationRefused("invalid", detail, param="stop")
    if request.logprobs is not None and not 0 <= request.logprobs <= LOGPROBS_LIMIT:
        detail = f"log-probabilities of 0 to {LOGPROBS_LIMIT} tokens can be told beside each token's own"
        raise GenerationRefused("invalid", detail, param="top_logprobs")


def first_fit(
    request: GenerationRequest, verifiers: tuple[Instance, ...], default_max_new: int
) -> tuple[Instance, int]:
    """The first verifier whose context and vocabulary hold the request, and `max_new` there. Raises GenerationRefused.

    Whatever cannot fit is refused here, before any session exists; drafts never take more room than max_new.
    """
    prompt, wanted = len(request.prompt), request.max_new
    longest, widest = 0, 0
    for one in verifiers:
        context, vocabulary = context_of(one), vocabulary_of(one)
        longest = max(longest, context or 0)
        widest = max(widest, vocabulary or 0)
        if vocabulary is not None and max(request.prompt) >= vocabulary:
            continue
        if context is None and wanted is not None:
            return one, wanted
        if context is not None and prompt + (1 if wanted is None else wanted) <= context:
            return one, min(context - prompt, default_max_new) if wanted is None else wanted
    if widest and max(request.prompt) >= widest:
        detail = f"the prompt holds a token id outside the model's vocabulary of {widest}"
        raise GenerationRefused("invalid", detail, param="prompt")
    if prompt >= longest or wanted is None:
        detail = f"the prompt has {prompt} tokens; the model's context holds {longest}, one of them generated at least"
        raise GenerationRefused("context_length", detail, param="prompt")
    detail = f"the prompt has {prompt} tokens; with {wanted} new ones they exceed the model's context of {longest}"
    raise GenerationRefused("context_length", detail, param="max_tokens")
