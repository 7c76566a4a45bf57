"""Fields of the client API that are known and not served: each is accepted with its neutral values only.

Theory: a field that is accepted and has no effect deceives its sender (he gets an answer without the penalty, the
grammar or the second choice he asked for). So a field is in one of three places: in a request Struct of openai.py,
where it is honoured; in a table here, with the values that ask for nothing; or nowhere, and then it is refused with
the nearest known name. Null always counts as absent, as in the OpenAI API.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from sdcpd.frontend.errors import ApiError, invalid, unsupported

S = TypeVar("S", bound=Struct)

Check = Callable[[object], bool]


class Neutral(Struct, frozen=True):
    """`accepts` tells the neutral values; `shown` writes them for people."""

    accepts: Check
    shown: str


def _is(*values: object) -> Check:
    """Equal in type as well: 1 is not true."""
    return lambda value: any(type(value) is type(wanted) and value == wanted for wanted in values)


def _number(wanted: int) -> Check:
    return lambda value: type(value) in (int, float) and value == wanted


def _a(kind: type) -> Check:
    return lambda value: type(value) is kind


NEVER: Final = Neutral(lambda _: False, "null")
FALSE: Final = Neutral(_is(False), "false")
TRUE: Final = Neutral(_is(True), "true")
ZERO: Final = Neutral(_number(0), "0")
ONE: Final = Neutral(_number(1), "1")
EMPTY_LIST: Final = Neutral(_is([]), "[]")
STRING: Final = Neutral(_a(str), "a string")

COMMON: Final[Mapping[str, Neutral]] = {
    "frequency_penalty": ZERO,
    "presence_penalty": ZERO,
    "logit_bias": Neutral(_is({}), "{}"),
    "store": FALSE,
    # Extensions of other servers that clients send along, mostly at their defaults.
    "repetition_penalty": ONE,
    "length_penalty": ONE,
    "min_tokens": Neutral(_is(0), "0"),
    "use_beam_search": FALSE,
    "include_stop_str_in_output": FALSE,
    "skip_special_tokens": TRUE,
    "spaces_between_special_tokens": TRUE,
    "prompt_logprobs": NEVER,
    "truncate_prompt_tokens": NEVER,
    "allowed_token_ids": NEVER,
    "bad_words": EMPTY_LIST,
    "structured_outputs": NEVER,
    "guided_json": NEVER,
    "guided_regex": NEVER,
    "guided_choice": NEVER,
    "guided_grammar": NEVER,
    "response_format": Neutral(_is({"type": "text"}), '{"type": "text"}'),
    "logits_processors": EMPTY_LIST,
    "priority": ZERO,
}

CHAT: Final[Mapping[str, Neutral]] = {
    **COMMON,
    "audio": NEVER,
    "function_call": Neutral(_is("none", "auto"), '"none" or "auto"'),
    "functions": EMPTY_LIST,
    "modalities": Neutral(_is(["text"]), '["text"]'),
    "moderation": NEVER,
    "parallel_tool_calls": Neutral(_a(bool), "true or false"),  # says nothing while there are no tools
    "prediction": NEVER,
    "prompt_cache_key": STRING,  # hints for a cache; they cannot change an answer
    "prompt_cache_retention": STRING,
    "reasoning_effort": NEVER,
    "safety_identifier": STRING,
    "service_tier": Neutral(_is("auto", "default"), '"auto" or "default"'),
    "tool_choice": Neutral(_is("none", "auto"), '"none" or "auto"'),
    "tools": EMPTY_LIST,
    "verbosity": Neutral(_is("medium"), '"medium"'),
    "web_search_options": NEVER,
    "add_generation_prompt": TRUE,
    "continue_final_message": FALSE,
    "add_special_tokens": FALSE,
    "chat_template": NEVER,
    "documents": EMPTY_LIST,
    "echo": FALSE,
    "include_reasoning": TRUE,
}

COMPLETION: Final[Mapping[str, Neutral]] = {
    **COMMON,
    "best_of": Neutral(_is(1), "1"),
    "echo": FALSE,
    "suffix": Neutral(_is(""), '""'),
    "add_special_tokens": TRUE,
}

TEXT_TOKENS: Final[Mapping[str, Neutral]] = {
    "mm_processor_kwargs": NEVER,
}

MESSAGE_TOKENS: Final[Mapping[str, Neutral]] = {
    "add_special_tokens": FALSE,
    "chat_template": NEVER,
    "continue_final_message": FALSE,
    "mm_processor_kwargs": NEVER,
    "tools": EMPTY_LIST,
}

STREAM_OPTIONS: Final[Mapping[str, Neutral]] = {
    "include_obfuscation": FALSE,
    "continuous_usage_stats": FALSE,
}

MESSAGE: Final[Mapping[str, Neutral]] = {
    "name": NEVER,  # templates do not know it
    "tool_calls": EMPTY_LIST,
    "tool_call_id": NEVER,
    "function_call": NEVER,
    "refusal": NEVER,
    "audio": NEVER,
    "annotations": EMPTY_LIST,
    "reasoning": NEVER,
    "reasoning_content": NEVER,
}

_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_NAMED: Final = re.compile(r"missing required field `([^`]*)`")


def read_fields(values: Mapping[str, object], kind: type[S], neutral: Mapping[str, Neutral], where: str = "") -> S:
    """`values` as a `kind`, once every field has been honoured or found neutral.

    `where` is the path of the object in the request, for example "messages[0]." Raises ApiError that names the field.
    """
    honoured: dict[str, object] = {}
    for name, value in values.items():
        if name in kind.__struct_encode_fields__:
            honoured[name] = value
        elif name not in neutral:
            raise unknown_field(where, name, [*kind.__struct_encode_fields__, *neutral])
        elif value is not None and not neutral[name].accepts(value):
            param = where + name
            shown = neutral[name].shown
            raise unsupported(param, f"{param} is not supported here; leave it out or send {shown}")
    try:
        return msgspec.convert(honoured, kind)
    except msgspec.ValidationError as error:
        raise wrong_value(where, str(error)) from error


def unknown_field(where: str, name: str, known: list[str]) -> ApiError:
    """400 with the nearest known name."""
    shown = name[:128]
    near = difflib.get_close_matches(shown, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return invalid(where + shown, f"unknown field {where + shown!r}{hint}", "unknown_parameter")


def wrong_value(where: str, complaint: str) -> ApiError:
    """A ValidationError of msgspec as 400; its text ends in the path of the offending value."""
    path = _PATH.search(complaint)
    missing = _NAMED.search(complaint)
    inner = path.group(1) if path else ""
    if missing:
        inner = f"{inner}.{missing.group(1)}" if inner else missing.group(1)
    param = (where + inner).rstrip(".") or None
    text = _PATH.sub("", complaint)
    return ApiError(400, f"{param}: {text}" if param else text, param=param, code="invalid_value")
