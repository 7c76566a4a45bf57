"""Names in certificates and the roles they stand for; the field `sdcpd-as` chooses, and adds nothing (bug 28)."""

import pytest

from sdcpd.edge.identity import (
    AS_FIELD,
    CertificateNames,
    CertifiedIdentity,
    ClaimedIdentity,
    PeerRole,
    canonical_roles,
    certificate_names,
    names_server,
    role_of,
    unnamed,
)
from sdcpd.protocol.problems import Forbidden
from sdcpd.roles.ports import Peer

A = "https://a.example/drafter/"
B = "https://b.example/drafter/"
ROUTER = "https://a.example/router/"


def certified(*uris: str, roles: dict[str, PeerRole] | None = None) -> CertifiedIdentity:
    return CertifiedIdentity(CertificateNames(uris=uris), roles or {})


def test_names_are_read_in_one_spelling() -> None:
    certificate = {
        "subjectAltName": (
            ("URI", "HTTPS://A.example:443/drafter"),
            ("URI", A),
            ("URI", "spiffe://x/y"),
            ("DNS", "A.Example"),
            ("IP Address", "127.0.0.1"),
            ("email", "a@b"),
        )
    }
    assert certificate_names(certificate) == CertificateNames(
        uris=(A, "spiffe://x/y"), hosts=("a.example", "127.0.0.1")
    )
    assert certificate_names({}) == certificate_names(None) == CertificateNames()


@pytest.mark.parametrize(
    ("uri", "role"),
    [
        (A, "drafter"),
        ("https://h.example:8470/deep/er/cache/", "cache"),
        ("https://h.example/operator/", "operator"),
        ("https://h.example/client/", "client"),
        ("https://h.example/admin/", None),
        ("https://h.example/", None),
        ("https://router/", None),  # a host's name is no path
        ("https://router", None),
        ("spiffe://cluster/router", None),  # no base URI
        ("https://h.example/router\0/", None),
        ("https://h.example/x?/router/", None),
        ("", None),
    ],
)
def test_the_role_is_the_last_segment_of_a_base_uri(uri: str, role: str | None) -> None:
    assert role_of(uri, {}) == role


def test_the_operators_map_comes_first() -> None:
    roles = canonical_roles({"spiffe://cluster/node-7": "verifier", "HTTPS://a.example/drafter": "operator"})
    assert role_of("spiffe://cluster/node-7", roles) == "verifier"
    assert role_of(A, roles) == "operator"
    assert role_of(B, roles) == "drafter"


def test_one_name_needs_no_claim() -> None:
    identity = certified("https://h.example/nothing/", A)
    assert identity.caller(None) == identity.caller(A) == Peer(uri=A, role="drafter")


@pytest.mark.parametrize(
    "claim", [B, ROUTER, "", "drafter", A.upper(), A[:-1], f"{A}, {B}", f"{A},{A}", "https://h.example/nothing/"]
)
def test_no_claim_goes_beyond_the_certificate(claim: str) -> None:
    """Also one in another spelling, or given twice (which arrives as a list)."""
    with pytest.raises(Forbidden, match=AS_FIELD):
        certified(A, "https://h.example/nothing/").caller(claim)


def test_with_several_names_the_claim_chooses_and_must() -> None:
    identity = certified(A, ROUTER)
    assert identity.caller(A) == Peer(uri=A, role="drafter")
    assert identity.caller(ROUTER) == Peer(uri=ROUTER, role="router")
    with pytest.raises(Forbidden, match="say in sdcpd-as"):
        identity.caller(None)
    with pytest.raises(Forbidden, match="does not carry"):
        identity.caller(B)


@pytest.mark.parametrize("claim", [None, A])
def test_a_certificate_without_a_role_is_nobody(claim: str | None) -> None:
    with pytest.raises(Forbidden, match="no URI of a role"):
        certified("https://h.example/nothing/").caller(claim)


def test_without_tls_the_claim_is_believed_and_must_be_one() -> None:
    assert ClaimedIdentity({}).caller(A) == Peer(uri=A, role="drafter")
    for claim in (None, "", "drafter", "https://h.example/nothing/", A[:-1]):
        with pytest.raises(Forbidden, match="without TLS"):
            ClaimedIdentity({}).caller(claim)


def test_a_server_is_known_by_its_base_uri() -> None:
    """Decision 32: by the host's name only where no URI is given and the operator says that one instance runs there."""
    named = CertificateNames(uris=(A,), hosts=("a.example",))
    assert names_server(named, A, "a.example", host_match=False)
    for host_match in (False, True):
        assert not names_server(named, "https://a.example/verifier/", "a.example", host_match=host_match)
    hosts = CertificateNames(hosts=("a.example", "10.0.0.1", "*.b.example"))
    assert names_server(hosts, A, "A.example", host_match=True)
    assert names_server(hosts, "https://10.0.0.1/drafter/", "10.0.0.1", host_match=True)
    assert not names_server(hosts, A, "a.example", host_match=False)
    assert not names_server(hosts, "https://x.b.example/drafter/", "x.b.example", host_match=True)
    assert unnamed(named, [A, B]) == [B]
