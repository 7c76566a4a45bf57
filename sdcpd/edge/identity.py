"""Who is calling, and whom we call: names in certificates, and the roles they stand for (decisions 31, 32, 112).

A certificate speaks for the base URIs among its subject alternative names. The base URI of role R is
`https://HOST:PORT/R/`: the role is the last segment of the path, unless the operator's map says otherwise for that URI;
a URI whose last segment is no role and which the map does not name speaks for nobody.

A node with several roles has one certificate with a URI for each, so the certificate alone does not say which of them
makes a request. The request does, in the field `sdcpd-as`, which holds one of these URIs in canonical form. It chooses
among what the certificate carries and can never add to it: any other value is 403, also when the certificate carries
one URI only. With a single URI the field may be left out; with several it may not, since a guess (by the route, by the
order of names) would let a request act for a role that its sender did not mean.

Without TLS (`insecure_loopback`) there is no certificate, and the same field is believed as it stands.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, Protocol, get_args
from urllib.parse import urlsplit

from msgspec import Struct

from sdcpd.protocol.problems import Forbidden
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.ports import Peer

PeerRole = Literal["router", "drafter", "verifier", "cache", "operator", "client"]
PEER_ROLES: Final = frozenset(get_args(PeerRole))

AS_FIELD: Final = "sdcpd-as"


class CertificateNames(Struct, frozen=True):
    """Subject alternative names. URIs are canonical where they are base URIs; hosts are DNS names and IP addresses."""

    uris: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class Identity(Protocol):
    """What a connection may speak for. Raises Forbidden when `claim` (the field's value, or None) is none of that."""

    def caller(self, claim: str | None) -> Peer: ...


def certificate_names(certificate: Mapping[str, object] | None) -> CertificateNames:
    """The names in what `ssl.SSLSocket.getpeercert()` returned."""
    found = (certificate or {}).get("subjectAltName", ())
    assert isinstance(found, tuple), "as getpeercert documents it"
    uris = [_canonical(value) for kind, value in found if kind == "URI"]
    hosts = [value.strip().lower() for kind, value in found if kind in ("DNS", "IP Address")]
    return CertificateNames(uris=tuple(dict.fromkeys(uris)), hosts=tuple(dict.fromkeys(hosts)))


def role_of(uri: str, roles: Mapping[str, PeerRole]) -> str | None:
    """The role that a URI stands for, by the operator's map or by its last path segment."""
    mapped = roles.get(uri)
    if mapped is not None:
        return mapped
    if not _is_base_uri(uri):
        return None
    last = urlsplit(uri).path.rstrip("/").rpartition("/")[2]  # of the path: a host may be called "router"
    return last if last in PEER_ROLES else None


class CertifiedIdentity:
    """The identity of a connection with a client certificate. `roles`: the operator's map, its URIs canonical."""

    def __init__(self, names: CertificateNames, roles: Mapping[str, PeerRole]) -> None:
        pairs = [(uri, role_of(uri, roles)) for uri in names.uris]
        self._peers: Final = {uri: Peer(uri=uri, role=role) for uri, role in pairs if role is not None}

    def caller(self, claim: str | None) -> Peer:
        """Raises Forbidden: the certificate names no role, not this one, or several and none was chosen."""
        if not self._peers:
            raise Forbidden("the certificate carries no URI of a role; it wants https://HOST:PORT/ROLE/ as a SAN")
        if claim is not None:
            peer = self._peers.get(claim)
            if peer is None:
                raise Forbidden(f"{AS_FIELD} names what the certificate does not carry")
            return peer
        if len(self._peers) > 1:
            raise Forbidden(f"the certificate carries several roles: say in {AS_FIELD} which of them is calling")
        return next(iter(self._peers.values()))


class ClaimedIdentity:
    """The identity of a connection without TLS, on loopback only: whoever can connect may claim to be anybody."""

    def __init__(self, roles: Mapping[str, PeerRole]) -> None:
        self._roles: Final = roles

    def caller(self, claim: str | None) -> Peer:
        """Raises Forbidden for a missing claim or one that stands for no role."""
        role = None if claim is None else role_of(claim, self._roles)
        if claim is None or role is None:
            raise Forbidden(f"without TLS {AS_FIELD} must hold the base URI of the role that is calling")
        return Peer(uri=claim, role=role)


def canonical_roles(roles: Mapping[str, PeerRole]) -> dict[str, PeerRole]:
    """The operator's map with its URIs as `certificate_names` spells them."""
    return {_canonical(uri): role for uri, role in roles.items()}


def names_server(names: CertificateNames, base_uri: str, host: str, *, host_match: bool) -> bool:
    """Is a server with these names the one at `base_uri`, whose host is `host`? (decision 32)

    The certificate must carry the base URI itself: a host's name is shared by all instances on it, and a drafter must
    not be able to pose as the verifier next door. Where one instance runs per host, the operator may allow
    (`host_match`) that a certificate without any URI is known by its host's name or address; wildcards are not read.
    """
    if names.uris:
        return base_uri in names.uris
    return host_match and host.lower() in names.hosts


def unnamed(names: CertificateNames, uris: Iterable[str]) -> list[str]:
    """Those of `uris` that are not among the names."""
    return [uri for uri in uris if uri not in names.uris]


def _canonical(uri: str) -> str:
    try:
        return normalize_base_uri(uri)
    except ValueError:
        return uri  # not a base URI, such as spiffe://...: the operator's map may know it


def _is_base_uri(uri: str) -> bool:
    try:
        return normalize_base_uri(uri) == uri
    except ValueError:
        return False
