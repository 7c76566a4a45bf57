"""Certificates as `sdcpctl certs` makes them: what they say, and that TLS believes the right ones."""

import ipaddress
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sdcpd.edge.identity import PEER_ROLES
from sdcpd.edge.tls import Tls, TlsSettings
from sdcpd.node.cert_facts import DAY_S, CertificateFacts, CertsRefused, expires_in_s, read_facts
from sdcpd.node.cert_hosts import CertHost, parse_host
from sdcpd.node.certs import CLOCK_SKEW_S, Made, init_authority, issue

NOW = float(int(time.time()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an authority."""
    init_authority(tmp_path / "ca", now=NOW)
    return tmp_path / "ca"


def node(folder: Path, role: str, host: str = "h.example:8470", **options: object) -> Made:
    return issue(folder, role.split(","), parse_host(host), now=NOW, **options)  # type: ignore[arg-type] # as written


def context(made: Made, ca: Path, *, server: bool) -> ssl.SSLContext:
    """As a careful peer would set it up: TLS 1.3, both sides authenticated, RFC 5280 to the letter."""
    result = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    result.minimum_version = ssl.TLSVersion.TLSv1_3
    result.verify_mode = ssl.CERT_REQUIRED
    result.verify_flags |= ssl.VERIFY_X509_STRICT
    result.load_cert_chain(made.certificate, made.key)
    result.load_verify_locations(ca)
    return result


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends after the handshake and an octet each way. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=host),
    )
    steps: list[Callable[[], object]] = [ends[1].do_handshake, ends[0].do_handshake] * 3
    for step in steps:
        try:
            step()
        except ssl.SSLWantReadError:
            continue
    for source, sink in (ends, ends[::-1]):
        source.write(b"x")
        assert sink.read(1) == b"x"
    return ends


@pytest.mark.parametrize("host", ["h.example", "127.0.0.1", "[::1]"])
def test_two_nodes_shake_hands(folder: Path, host: str) -> None:
    serving, calling = node(folder, "verifier,cache", f"{host}:8470"), node(folder, "drafter", "d.example")
    ca = folder / "ca.pem"
    server, client = handshake(
        context(serving, ca, server=True), context(calling, ca, server=False), host=host.strip("[]")
    )
    assert server.version() == client.version() == "TLSv1.3"
    seen = server.getpeercert()
    assert seen is not None
    assert seen["subjectAltName"] == (
        ("URI", "https://d.example/drafter/"),
        ("URI", "https://d.example/cache/"),
        ("DNS", "d.example"),
    )


def test_a_client_without_a_certificate_is_refused(folder: Path) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(folder / "ca.pem")
    server = context(node(folder, "verifier"), folder / "ca.pem", server=True)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        handshake(server, bare, "h.example")


@pytest.mark.parametrize("stranger_serves", [True, False])
def test_a_certificate_of_another_authority_is_refused(folder: Path, tmp_path: Path, stranger_serves: bool) -> None:
    """Also of one that goes by the same name."""
    init_authority(tmp_path / "other", now=NOW)
    ours, theirs = node(folder, "verifier"), node(tmp_path / "other", "verifier")
    server, client = (theirs, ours) if stranger_serves else (ours, theirs)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(
            context(server, folder / "ca.pem", server=True),
            context(client, folder / "ca.pem", server=False),
            "h.example",
        )


def test_a_node_cannot_sign_for_another(folder: Path, tmp_path: Path) -> None:
    """A node that turns authority, with its certificate in the chain, is believed by nobody."""
    captured = node(folder, "drafter")
    rogue = tmp_path / "rogue"
    rogue.mkdir(mode=0o700)
    (rogue / "ca.pem").write_bytes(captured.certificate.read_bytes())
    (rogue / "ca.key").write_bytes(captured.key.read_bytes())
    with pytest.raises(CertsRefused, match="may not sign"):
        node(rogue, "verifier")


@pytest.mark.parametrize(
    ("roles", "served"),
    [
        ("router", "router"),
        ("verifier,cache", "verifier,cache"),
        ("drafter", "drafter,cache"),
        ("verifier,router", "verifier,router,cache"),
        ("operator", "operator"),
        ("client", "client"),
        ("cache", "cache"),
    ],
)
def test_the_daemon_takes_them(folder: Path, roles: str, served: str) -> None:
    """The daemon's own check at start: a handshake with itself, and the URI of each role under which it answers."""
    made = node(folder, roles, "[2001:db8::7]:8470")
    settings = TlsSettings(certificate=str(made.certificate), key=str(made.key), ca=str(folder / "ca.pem"))
    uris = [f"https://[2001:db8::7]:8470/{role}/" for role in served.split(",")]
    own = Tls(settings, uris).own
    assert own.names.uris == tuple(uris)
    assert own.names.hosts == ("2001:db8:0:0:0:0:0:7",)
    assert own.expires_s == NOW + 365 * DAY_S


def test_every_role_of_the_wire_can_be_issued(folder: Path) -> None:
    roles = sorted(PEER_ROLES)
    assert node(folder, ",".join(roles)).facts.roles == tuple(roles)


def loaded(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_what_a_node_certificate_holds(folder: Path) -> None:
    made = node(folder, "verifier,cache", "192.0.2.7:8470", days=30)
    certificate = loaded(made.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [
        x509.UniformResourceIdentifier("https://192.0.2.7:8470/verifier/"),
        x509.UniformResourceIdentifier("https://192.0.2.7:8470/cache/"),
        x509.IPAddress(ipaddress.ip_address("192.0.2.7")),
    ]
    assert certificate.not_valid_before_utc.timestamp() == NOW - CLOCK_SKEW_S
    assert certificate.not_valid_after_utc.timestamp() == NOW + 30 * DAY_S
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {use._name for use in uses} == {"serverAuth", "clientAuth"}
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert (usage.value.digital_signature, usage.value.key_cert_sign) == (True, False)


def test_what_the_authority_holds(folder: Path) -> None:
    certificate = loaded(folder / "ca.pem")
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign) == (False, True)


def test_serials_are_random(folder: Path) -> None:
    serials = {loaded(node(folder, role).certificate).serial_number for role in PEER_ROLES}
    assert len(serials) == len(PEER_ROLES)
    assert min(serials) > 1 << 64  # 2**159 of them: one in 2**95 fails


def test_files_and_folder_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "ca"
    made = [
        init_authority(folder, now=NOW),
        node(folder, "router"),
        node(folder, "cache", out=tmp_path / "x" / "c.pem"),
    ]
    assert (made[1].certificate, made[1].key) == (
        folder / "router-h.example-8470.pem",
        folder / "router-h.example-8470.key",
    )
    assert (made[2].certificate, made[2].key) == (tmp_path / "x" / "c.pem", tmp_path / "x" / "c.key")
    for entry in made:
        assert [path.stat().st_mode & 0o777 for path in (entry.certificate, entry.key)] == [0o600, 0o600]
        assert entry.key.parent.stat().st_mode & 0o777 == 0o700
        key = serialization.load_pem_private_key(entry.key.read_bytes(), password=None)
        assert key.public_key() == loaded(entry.certificate).public_key()


def test_nothing_is_overwritten_unless_forced(folder: Path) -> None:
    made = node(folder, "router")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CertsRefused, match="--force"):
        node(folder, "router")
    with pytest.raises(CertsRefused, match="--force"):
        init_authority(folder, now=NOW)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    made.certificate.unlink()  # the key alone is in the way as well
    with pytest.raises(CertsRefused, match=r"router-h.example-8470.key"):
        node(folder, "router")
    node(folder, "router", force=True)
    assert made.key.read_bytes() != before[made.key]
    assert sorted(path.suffix for path in folder.iterdir()) == [".key", ".key", ".pem", ".pem"]


def test_out_may_be_a_folder_or_end_in_anything(folder: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    assert node(folder, "router", out=out).certificate == out / "router-h.example-8470.pem"
    assert node(folder, "router", out=out / "h.example").key == out / "h.example.key"


def test_a_node_does_not_outlive_its_authority(tmp_path: Path) -> None:
    init_authority(tmp_path / "ca", days=100, now=NOW)
    with pytest.raises(CertsRefused, match="--days 100"):
        node(tmp_path / "ca", "router")
    assert node(tmp_path / "ca", "router", days=100).facts.days_left(NOW) == 100
    with pytest.raises(CertsRefused, match="Is the clock right"):
        issue(tmp_path / "ca", ["router"], CertHost("h.example"), now=NOW + 101 * DAY_S)


def test_an_authority_that_is_being_replaced(folder: Path, tmp_path: Path) -> None:
    """ca.pem may hold the old authority beside the new; the key says which of them signs."""
    old = (folder / "ca.pem").read_bytes()
    init_authority(folder, now=NOW, name="new CA", force=True)
    (folder / "ca.pem").write_bytes(old + (folder / "ca.pem").read_bytes())
    assert node(folder, "router").facts.issuer == "CN=new CA"
    (folder / "ca.pem").write_bytes(old)
    with pytest.raises(CertsRefused, match="is not the key of"):
        node(folder, "verifier")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "ca.key").unlink(), "cannot be read"),
        (lambda folder: (folder / "ca.key").write_text("?"), "no private key"),
        (lambda folder: (folder / "ca.pem").write_text("?"), "no certificate"),
        (lambda folder: [path.unlink() for path in list(folder.iterdir())], "certs init"),
        (lambda folder: folder.chmod(0o770), "chmod go-w"),
        (lambda folder: (folder / "ca.key").write_bytes(encrypted(folder / "ca.key")), "encrypted"),
        (lambda folder: (folder / "ca.pem").write_bytes(bytes(2 << 20)), "longer than"),
    ],
    ids=["no key", "bad key", "bad certificate", "none", "open folder", "encrypted", "huge"],
)
def test_refusals_say_what_to_do(folder: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(folder)
    with pytest.raises(CertsRefused, match=said):
        node(folder, "router")


def encrypted(path: Path) -> bytes:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"x"))


@pytest.mark.parametrize("days", [0, -1, 36_526])
def test_days_have_limits(tmp_path: Path, folder: Path, days: int) -> None:
    with pytest.raises(CertsRefused, match="--days"):
        init_authority(tmp_path / "other", days=days, now=NOW)
    with pytest.raises(CertsRefused, match="--days"):
        node(folder, "router", days=days)


@pytest.mark.parametrize("name", ["", "n" * 65, "a\x1b[2J"])
def test_names_of_authorities_have_limits(tmp_path: Path, name: str) -> None:
    with pytest.raises(CertsRefused, match="name"):
        init_authority(tmp_path / "other", name=name, now=NOW)


def test_states() -> None:
    facts = CertificateFacts("f", "s", "i", False, (), (), (), 1000.0, 1000.0 + 30 * DAY_S, "1", "aa")
    ends = facts.not_after_s
    assert facts.state(999.0) == "not yet valid"
    assert facts.state(1000.0) == "good"
    assert facts.state(ends - 14 * DAY_S - 1) == "good"
    assert facts.state(ends - 14 * DAY_S) == "expires soon"
    assert facts.state(ends) == "expired"
    assert facts.days_left(ends + DAY_S) == -1


def test_expiry_for_the_metric_is_the_first_of_a_chain(folder: Path) -> None:
    made = node(folder, "router", days=20)
    assert expires_in_s(made.certificate, NOW) == 20 * DAY_S
    assert expires_in_s(made.certificate, NOW + 21 * DAY_S) == -DAY_S
    made.certificate.write_bytes((folder / "ca.pem").read_bytes() + made.certificate.read_bytes())
    assert expires_in_s(made.certificate, NOW) == 20 * DAY_S
    with pytest.raises(CertsRefused, match="no certificate"):
        expires_in_s(made.key, NOW)


def test_reading_a_folder_passes_over_what_is_none(folder: Path) -> None:
    node(folder, "router")
    (folder / "bundle.pem").write_bytes(b"# both\n" + (folder / "ca.pem").read_bytes() * 2)
    (folder / "key.pem").write_bytes((folder / "ca.key").read_bytes())
    (folder / "sdcpd.toml").write_text("roles = []")
    (folder / "old.pem").mkdir()
    names = [Path(facts.file).name for facts in read_facts(folder)]
    assert names == ["bundle.pem", "bundle.pem", "ca.pem", "router-h.example-8470.pem"]
