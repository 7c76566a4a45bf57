"""Settings of a node among others: whom it works with, and where operators look at it. Composed by node/config.py."""

from typing import Annotated

from msgspec import Meta, Struct

from sdcpd.edge.wire_settings import PeerClientSettings, split_listen


class PeersSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[peers]`: base URIs of the roles elsewhere that this node's roles call. Drafters and verifiers need not be
    named: they report themselves to their routers."""

    routers: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """To whom a verifier or a drafter reports its status. A router on this node is among them without being named."""
    caches: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Caches that may be asked (decision 21). The first is where a router has commit logs kept and publishes token
    arrays. A cache role on this node comes before all of them without being named."""
    calls: PeerClientSettings = PeerClientSettings()


class MetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[metrics]`: a port for /metrics, /health and /ready, on nodes with and without a client port."""

    listen: str
    """`host:port`; port 0 takes a free one. What is served names no user and no text, so any address is allowed."""

    def __post_init__(self) -> None:
        split_listen(self.listen)
