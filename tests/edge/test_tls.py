"""The contexts of a node: what is refused before it is used, and that a bad reload changes nothing."""

import datetime
import shutil
import ssl
from pathlib import Path

import msgspec
import pytest

from sdcpd.edge.tls import ALPN, Tls, TlsRefused, TlsSettings
from tests.edge.wire.pki import HOUR, Authority

V = "https://v.example/verifier/"
C = "https://v.example/cache/"


def test_both_contexts_ask_for_certificates_and_speak_tls_1_3_only(authority: Authority) -> None:
    tls = Tls(authority.issue(V, "v.example"))
    for context in (tls.server, tls.client):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert tls.server.num_tickets == 0


def test_the_nodes_own_certificate_is_read(authority: Authority) -> None:
    own = Tls(authority.issue(V, C, "v.example", "10.0.0.1"), must_name=[C, V]).own
    assert own.names.uris == (V, C)
    assert own.names.hosts == ("v.example", "10.0.0.1")
    left_s = own.expires_s - datetime.datetime.now(datetime.UTC).timestamp()
    assert 3500 < left_s <= 3600


def changed(settings: TlsSettings, **changes: str) -> TlsSettings:
    return msgspec.structs.replace(settings, **changes)


def test_what_cannot_be_used_is_refused_with_its_name(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue(V), authority.issue(V)
    stranger = Authority(tmp_path, "stranger")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no PEM")
    for settings, words in (
        (changed(good, certificate="/no/such.crt"), r"tls.certificate = /no/such.crt cannot be read: No such file"),
        (changed(good, key="/no/such.key"), r"tls.key = /no/such.key cannot be read"),
        (changed(good, ca=str(tmp_path)), r"tls.ca = .* cannot be read: Is a directory"),
        (changed(good, ca=str(garbage)), r"tls.ca = .* holds no certificates"),
        (changed(good, key=other.key), r"are not a certificate and its own key in PEM: key values mismatch"),
        (changed(good, certificate=str(garbage)), r"are not a certificate and its own key"),
        (changed(good, ca=str(stranger.path)), r"does not stand a handshake .* unable to get local issuer"),
        (authority.issue(V, encrypted=True), r"tls.key is encrypted"),
        (authority.issue(V, life=-HOUR), r"does not stand a handshake .* certificate has expired"),
    ):
        with pytest.raises(TlsRefused, match=words):
            Tls(settings)


def test_a_certificate_must_name_the_nodes_roles(authority: Authority) -> None:
    with pytest.raises(TlsRefused, match=f"does not carry the URI {C}, by which"):
        Tls(authority.issue(V), must_name=[V, C])
    hosts_only = authority.issue("v.example")
    with pytest.raises(TlsRefused, match="does not carry"):
        Tls(hosts_only, must_name=[V])
    matched = Tls(
        TlsSettings(certificate=hosts_only.certificate, key=hosts_only.key, ca=hosts_only.ca, host_match=True)
    )
    assert matched.names_server(matched.own.names, V, "v.example")


def test_a_reload_takes_good_files_and_keeps_the_old_ones_otherwise(authority: Authority) -> None:
    settings, newer, older = authority.issue(V), authority.issue(V, C), authority.issue(V, life=-HOUR)
    tls = Tls(settings, must_name=[V])
    before = tls.server, tls.client
    shutil.copy(older.certificate, settings.certificate)
    reason = tls.reload()
    assert reason is not None
    assert "key values mismatch" in reason
    shutil.copy(older.key, settings.key)
    assert "expired" in (tls.reload() or "")
    assert (tls.server, tls.client) == before
    assert C not in tls.own.names.uris
    shutil.copy(newer.certificate, settings.certificate)
    shutil.copy(newer.key, settings.key)
    assert tls.reload() is None
    assert C in tls.own.names.uris
    assert tls.server is not before[0]
    assert tls.client is not before[1]


def test_settings_refuse_what_they_do_not_know() -> None:
    files = {"certificate": "a", "key": "b", "ca": "c"}
    read = msgspec.convert(files | {"roles": {"spiffe://x": "verifier"}}, TlsSettings)
    assert read.roles == {"spiffe://x": "verifier"}
    for more in ({"roles": {"spiffe://x": "king"}}, {"verify": False}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(files | more, TlsSettings)


def test_the_protocol_offered_is_http_2_alone(authority: Authority) -> None:
    """ALPN, seen from a client that offers more."""
    tls = Tls(authority.issue(V))
    tls.client.set_alpn_protocols(["http/1.1", "h2"])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.client.wrap_bio(to_client, to_server)
    server = tls.server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.selected_alpn_protocol() == server.selected_alpn_protocol() == ALPN == "h2"
