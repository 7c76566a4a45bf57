"""The `messages` of a chat request.

Roles: `system`, `user` and `assistant` reach the template as they are. `developer` is the newer name of `system` in
the OpenAI API, which templates do not know, so it becomes `system`. `tool` and `function` are refused by name, as
tools are not served. Content is a string, or a list of parts of type text, which are joined by a line break; other
parts are refused by name. A null content is allowed nowhere, since it stands for a tool call.
"""

from typing import Final

from msgspec import Struct

from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.errors import invalid, unsupported
from sdcpd.frontend.fields import MESSAGE, read_fields

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class _Message(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[dict[str, object]] | None = None


class _TextPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str


def read_messages(values: list[dict[str, object]]) -> tuple[ChatMessage, ...]:
    """Raises ApiError that names the message and field. The list's length is bounded by the body's limit."""
    if not values:
        raise invalid("messages", "messages is empty; send at least one message")
    return tuple(_read_message(value, f"messages[{index}].") for index, value in enumerate(values))


def _read_message(value: dict[str, object], where: str) -> ChatMessage:
    message = read_fields(value, _Message, MESSAGE, where)
    role = ROLES.get(message.role)
    if role is None:
        param = where + "role"
        if message.role in ("tool", "function"):
            raise unsupported(param, f"{param}: messages of role {message.role!r} are not supported")
        raise invalid(param, f"{param}: must be one of {', '.join(ROLES)}")
    if message.content is None:
        raise invalid(where + "content", f"{where}content must be a string or a list of text parts")
    if isinstance(message.content, str):
        return ChatMessage(role, message.content)
    if not message.content:
        raise invalid(where + "content", f"{where}content is an empty list; send a string or text parts")
    parts = [_read_part(part, f"{where}content[{index}].") for index, part in enumerate(message.content)]
    return ChatMessage(role, "\n".join(parts))


def _read_part(value: dict[str, object], where: str) -> str:
    kind = value.get("type")
    if isinstance(kind, str) and kind != "text":
        raise unsupported(where + "type", f"{where}type: parts of type {kind[:64]!r} are not supported, only text")
    return read_fields(value, _TextPart, {}, where).text
