"""What is answered when a request cannot be served: the OpenAI error object, with its status.

Theory: an ApiError is the client's doing or a limit of ours, raised where it is found and rendered in one place. It
says which parameter (`param`) and what to do instead. The same object, without a status, is what a stream carries
when it breaks off.
"""

from typing import Final, assert_never

import msgspec
from msgspec import Struct

from sdcpd.roles.generation import GenerationRefused

RETRY_AFTER_S: Final = 1
"""Default of `Retry-After`: a place frees within seconds, as answers end."""

COME_AGAIN: Final = frozenset(
    {
        "verifier_overloaded",
        "verifier_unreachable",
        "verifier_lost",
        "directory_unreachable",
        "prompt_unpublished",
        "log_unreachable",
        "taken_over",
        "router_stopped",
    }
)
"""Reasons of the router with which a generation ends that say nothing about the request: another try may well do."""


class ApiError(Exception):
    """One refusal. `param` names the field, as `messages[0].content` does; `headers` are added to the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status: Final = status
        self.message: Final = message
        self.param: Final = param
        self.code: Final = code
        self.headers: Final = headers
        self.limit: Final = limit

    @property
    def type(self) -> str:
        """OpenAI's coarse classes: the client's fault, its limits, or ours. For 429 the limit that was met."""
        if self.status == 429:
            return self.limit or "requests"
        return "invalid_request_error" if self.status < 500 else "server_error"


class _ErrorObject(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(Struct, frozen=True):
    error: _ErrorObject


def error_body(error: ApiError) -> bytes:
    """The JSON body."""
    return msgspec.json.encode(_ErrorBody(_ErrorObject(error.message, error.type, error.param, error.code)))


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """400 that names a parameter."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400 for a field or value that exists in the API, and is not served here."""
    return invalid(param, message, "unsupported_parameter")


def model_not_found(name: str, known: tuple[str, ...]) -> ApiError:
    """404 that says which models there are."""
    shown = ", ".join(known) or "none"
    return ApiError(
        404, f"the model {name[:256]!r} does not exist; available: {shown}", param="model", code="model_not_found"
    )


def context_length_exceeded(param: str, message: str) -> ApiError:
    """400, before any session is opened."""
    return invalid(param, message, "context_length_exceeded")


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """503: nothing is wrong with the request, come again."""
    return ApiError(503, message, code=code, headers=(("retry-after", str(retry_after_s)),))


def too_many(message: str, limit: str, retry_after_s: int) -> ApiError:
    """429: the key's own limit is met. `limit` is "requests" or "tokens", which the API writes as the error's type."""
    headers = (("retry-after", str(retry_after_s)),)
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers, limit=limit)


def wrong_key(message: str) -> ApiError:
    """401. Says nothing of the key but that it is missing or none of ours."""
    return ApiError(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))


def failed(reason: str) -> ApiError:
    """The generation broke off: 503 for the reasons of COME_AGAIN, else 500.

    `reason` is a code of the router's, never a text of a user.
    """
    if reason in COME_AGAIN:
        return unavailable(f"the generation could not be carried through ({reason}); try again", reason)
    return ApiError(500, f"the generation failed: {reason}", code=reason)


def server_stopping() -> ApiError:
    """503: what a stop of the server leaves of an answer that its grace was too short for."""
    return unavailable("the server is stopping; try again", "server_stopping")


def from_refusal(refusal: GenerationRefused) -> ApiError:
    """The router's refusal as a client sees it."""
    retry_after_s = RETRY_AFTER_S if refusal.retry_after_s is None else refusal.retry_after_s
    match refusal.reason:
        case "unknown_model":
            return ApiError(404, refusal.detail, param="model", code="model_not_found")
        case "context_length":
            return ApiError(400, refusal.detail, param=refusal.param, code="context_length_exceeded")
        case "invalid":
            return ApiError(400, refusal.detail, param=refusal.param)
        case "overloaded" | "not_ready":
            return unavailable(refusal.detail, refusal.reason, retry_after_s)
        case _:
            assert_never(refusal.reason)
