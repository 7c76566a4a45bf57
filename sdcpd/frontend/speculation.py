"""The request field `speculation`, an extension: what a client may ask of speculation for one answer.

    "speculation": {"enabled": false, "m_max": 8, "class": "batch", "stats": true}

All are optional. `enabled` false decodes without a drafter; `m_max` bounds proposals below what the model's ladder
says; `class` names a traffic class of the operator's; `stats` asks for `metrics.speculative_decoding` beside the usage.
The texts "on" and "off" are short for `enabled`. Whatever is asked, the text of the answer is the same.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct, field

from sdcpd.frontend.errors import invalid
from sdcpd.frontend.fields import read_fields
from sdcpd.protocol.terms import M_MAX_LIMIT

SHORT: Final = {"on": True, "off": False}


class _Speculation(Struct, frozen=True, kw_only=True):
    enabled: bool | None = None
    m_max: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)] | None = None
    traffic_class: Annotated[str, Meta(min_length=1, max_length=128)] | None = field(default=None, name="class")
    stats: bool | None = None


class SpeculationWish(Struct, frozen=True, kw_only=True):
    """What was asked for. None: as the model's ladder and the operator have it."""

    enabled: bool = True
    m_max: int | None = None
    traffic_class: str | None = None
    stats: bool = False


def read_speculation(value: str | dict[str, object] | None) -> SpeculationWish:
    """Raises ApiError that names the field."""
    if value is None:
        return SpeculationWish()
    if isinstance(value, str):
        if value not in SHORT:
            raise invalid("speculation", 'speculation: must be an object, "on" or "off"', "invalid_value")
        return SpeculationWish(enabled=SHORT[value])
    read = read_fields(value, _Speculation, {}, "speculation.")
    return SpeculationWish(
        enabled=read.enabled is not False, m_max=read.m_max, traffic_class=read.traffic_class, stats=bool(read.stats)
    )
