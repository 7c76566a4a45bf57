"""Settings of the SDCP port and of calls to peers, with their reasons. Composed into the node's file by the node."""

import ipaddress
from typing import Annotated

from msgspec import Meta, Struct

SecondsSetting = Annotated[float, Meta(gt=0, le=86_400)]


class PeerServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SDCP port. Raises ValueError (a ValidationError while decoding) for an address that is none."""

    listen: str = "127.0.0.1:8470"
    """`host:port`; port 0 takes a free one."""
    insecure_loopback: bool = False
    """Plain HTTP/2, where peers are whoever they say they are: for one machine and one user, on loopback only."""
    max_connections: Annotated[int, Meta(ge=1, le=16_384)] = 512
    """One more is closed at once. A peer takes two or three; each holds a socket and some 64 KiB of buffers."""
    max_handshakes: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Handshakes under way. When one more comes, the oldest gives way: an honest one is over in milliseconds."""
    handshake_timeout_s: SecondsSetting = 5
    """Several round trips to the far side of the earth, and a loss."""
    streams_per_connection: Annotated[int, Meta(ge=1, le=900)] = 512
    """Requests under way on one connection: h2 counts them all for each new one."""
    idle_connection_timeout_s: SecondsSetting = 300
    """Above the time at which our own client drops an idle connection, so that it never uses a dying one."""
    stalled_peer_timeout_s: SecondsSetting = 30
    """A peer that takes none of its answer for so long is taken for gone."""
    grace_s: SecondsSetting = 5
    """What a stop grants running requests to finish."""

    def __post_init__(self) -> None:
        split_listen(self.listen)


class PeerClientSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls to peers."""

    connect_timeout_s: SecondsSetting = 5
    """For name, connection, handshake and the peer's first frame. Deadlines of calls may be shorter."""
    idle_connection_timeout_s: SecondsSetting = 60
    """A connection without a request for so long is closed."""
    max_connection_age_s: SecondsSetting = 3600
    """Then a new one takes its place: certificates are looked at again at least so often."""
    ping_interval_s: SecondsSetting = 5
    """A peer that owes an answer and has been silent for so long is asked whether it lives."""
    ping_timeout_s: SecondsSetting = 5
    """A peer that does not answer that in time has gone, and with it all requests on the connection."""
    max_connections: Annotated[int, Meta(ge=1, le=64)] = 8
    """To one peer, for each class of requests (control, long polls). A further one is opened when streams run out."""
    max_waiting: Annotated[int, Meta(ge=0, le=65_536)] = 1024
    """Requests that wait for a connection or a free stream of one peer and class; one more fails at once."""
    max_answer_bytes: Annotated[int, Meta(ge=1024)] = 64 * 1024 * 1024
    """A longer answer is given up. Commit logs and objects have lower limits by default."""


def split_listen(listen: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port). Raises ValueError with the remedy."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"listen = {listen!r} is not host:port, for example 127.0.0.1:8470")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"listen = {listen!r}: write an IPv6 address in brackets, for example [::1]:8470")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Does this host, as it stands in an address or a base URI, mean this machine only?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
