"""The directory record of a session: what a router must know to take it up again after a restart (decisions 106, 111).

It is written before the first session-open and before each change of verifier, so at any moment the session lives where
the record says, or nowhere. Where it stands is not in it: that is the log's and the verifier's to say. The incarnation
rises with each life of a router that takes the session up, by compare-and-set: of two that try one succeeds.
"""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType, field

from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import Message, Policy, SessionOpen
from sdcpd.protocol.placement_values import FIRST_EPOCH, Plan
from sdcpd.protocol.terms import BaseUri, Uint


class DirectoryRecord(Message, frozen=True, kw_only=True):
    """`open` is the first session-open, of epoch 1. `verifier` is asked to serve the session at `epoch`."""

    open: SessionOpen
    verifier: BaseUri
    epoch: Uint
    drafter: BaseUri | UnsetType = UNSET
    incarnation: Uint
    policies: tuple[Policy, ...] = ()
    model: str = field(default="", name="sdcpd_model")  # the name under which a client asked for it
    m_init: Uint = field(name="sdcpd_m_init")
    speculation: bool = field(default=True, name="sdcpd_speculation")
    traffic_class: str = field(default="", name="sdcpd_class")
    vocabulary: Uint | UnsetType = field(default=UNSET, name="sdcpd_vocabulary")
    claim: str | UnsetType = field(default=UNSET, name="sdcpd_claim")  # a nonce of its writer: no two write the same


def write_directory_record(
    plan: Plan,
    *,
    prompt: tuple[int, ...] | str,
    verifier: str,
    epoch: int,
    drafter: str | None,
    policies: Sequence[Policy] = (),
) -> bytes:
    """The record's octets, the same for the same state. `prompt` is what the session-open carries."""
    return encode(
        DirectoryRecord(
            open=plan.opening(FIRST_EPOCH, prompt),
            verifier=verifier,
            epoch=epoch,
            drafter=UNSET if drafter is None else drafter,
            incarnation=plan.incarnation,
            policies=tuple(policies),
            model=plan.model,
            m_init=plan.m_init,
            speculation=plan.speculation,
            traffic_class=plan.traffic_class,
            vocabulary=UNSET if plan.vocabulary is None else plan.vocabulary,
            claim=plan.nonce or UNSET,
        )
    )


def read_directory_record(octets: bytes) -> DirectoryRecord:
    """Inverse of `write_directory_record`. Raises IllFormed or BadContract."""
    return decode(octets, DirectoryRecord)
