"""A certificate authority and certificates of nodes, as files: what `sdcpctl certs init` and `issue` make.

Theory: all nodes of one deployment trust one authority, whose key stays with the operator. A node has one certificate,
with which it serves and calls. It carries a SAN URI for each role of the node, `https://HOST:PORT/ROLE/`, which is what
peers know it by (decision 112), and the host as a DNS or IP name for general tools. Whoever holds a key acts for its
roles until the certificate expires: there is no revocation. So the files are for their owner only, and lifetimes are a
setting.

    DIR/ca.pem    the authority's certificate: goes to every node
    DIR/ca.key    its key: stays here
    DIR/NAME.pem  a node's certificate
    DIR/NAME.key  its key

Keys are EC P-256, which every TLS library has and which cost a node least in a handshake; they are not encrypted, since
a daemon has nobody to ask for a passphrase. Needs the `cryptography` library.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

from sdcpd.node.cert_facts import (
    CertificateFacts,
    CertsRefused,
    certificate_facts,
    is_authority,
    load_certificates,
    read_pem,
)
from sdcpd.node.cert_hosts import CertHost
from sdcpd.node.private_files import make_private_folder, write_private

CA_NAME: Final = "sdcpd CA"
CA_DAYS: Final = 3650
NODE_DAYS: Final = 365
DAYS_LIMIT: Final = 36_525
"""A century; a longer lifetime is a slip of the hand, and dates in certificates end with the year 9999."""

COMMON_NAME_LIMIT_CHARACTERS: Final = 64
"""X.509's own (RFC 5280, ub-common-name)."""

CLOCK_SKEW_S: Final = 600
"""How far before now a certificate begins to hold: a node whose clock lags a little can use it at once."""

AUTHORITY: Final = "ca"
"""Stem of the authority's files."""

AuthorityKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

KEEP_OBJECTS: Final = frozenset({"drafter", "verifier"})
"""Roles whose node keeps objects for its peers to read, at its own `/cache/` (decision 112)."""


class Made(Struct, frozen=True):
    """A certificate and its key, just written."""

    certificate: Path
    key: Path
    facts: CertificateFacts


def init_authority(folder: Path, *, name: str = CA_NAME, days: int = CA_DAYS, now: float, force: bool = False) -> Made:
    """Make an authority in `folder`, which is made for its owner only if it is missing. Raises CertsRefused."""
    _check_days(days)
    if not 1 <= len(name) <= COMMON_NAME_LIMIT_CHARACTERS or not name.isprintable():
        raise CertsRefused(f"the authority's name must be 1 to {COMMON_NAME_LIMIT_CHARACTERS} printable characters.")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _common_name(name)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(subject, subject, key.public_key(), days, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _write(folder / AUTHORITY, certificate, key, force)


def issue(
    folder: Path,
    roles: Sequence[str],
    host: CertHost,
    *,
    days: int = NODE_DAYS,
    now: float,
    out: Path | None = None,
    force: bool = False,
) -> Made:
    """Issue a certificate for a node that plays `roles` at `host`, signed by the authority in `folder`.

    A node with a drafter or verifier keeps their objects as a cache does, so its certificate carries that URI as well.
    Written to `out` with .pem and .key added, or, where that is a folder or None, there or in `folder` under a name
    made of roles and host. Raises CertsRefused.
    """
    assert roles, "a certificate without a role speaks for nobody"
    _check_days(days)
    authority, authority_key = _load_authority(folder, now)
    ends = _instant(now + days * 86_400)
    if ends > authority.not_valid_after_utc:
        left = int((authority.not_valid_after_utc - _instant(now)).total_seconds() // 86_400)
        raise CertsRefused(
            f"the authority in {folder} itself ends in {left} days: ask for fewer (--days {left}), or make another "
            "authority (sdcpctl certs init) and issue all nodes' certificates anew."
        )
    stem = f"{'-'.join(roles)}-{host.file_stem}"
    key = ec.generate_private_key(ec.SECP256R1())
    served = dict.fromkeys((*roles, "cache") if KEEP_OBJECTS & set(roles) else roles)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(host.role_uri(role)) for role in served]
    address = host.address
    names.append(x509.DNSName(host.name) if address is None else x509.IPAddress(address))
    # Both uses for all roles: a node serves and calls, and checks at start that its certificate is good for both.
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(_common_name(stem[:COMMON_NAME_LIMIT_CHARACTERS]), authority.subject, key.public_key(), days, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(uses, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_issuer_identifier(authority), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return _write(_place(folder, stem, out), certificate, key, force)


def _load_authority(folder: Path, now: float) -> tuple[x509.Certificate, AuthorityKey]:
    """The authority's key, and the certificate of it among those in ca.pem (there are two while one is replaced)."""
    certificate_path, key_path = _files(folder / AUTHORITY)
    if not certificate_path.exists() and not key_path.exists():
        raise CertsRefused(f"{folder} holds no authority. Make one: sdcpctl certs init --dir {folder}")
    certificates = load_certificates(certificate_path)
    key = _load_key(key_path)
    certificate = next((entry for entry in certificates if entry.public_key() == key.public_key()), None)
    if certificate is None:
        raise CertsRefused(f"{key_path} is not the key of {certificate_path}. Restore the pair from your backup.")
    if not is_authority(certificate):
        raise CertsRefused(f"{certificate_path} is not an authority's certificate: it may not sign others.")
    if not certificate.not_valid_before_utc <= _instant(now) < certificate.not_valid_after_utc:
        raise CertsRefused(
            f"the authority in {certificate_path} holds from {certificate.not_valid_before_utc:%Y-%m-%d} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}, and not now. Is the clock right? If so, make another one "
            "(sdcpctl certs init) and issue all nodes' certificates anew."
        )
    return certificate, key


def _load_key(path: Path) -> AuthorityKey:
    try:
        key = serialization.load_pem_private_key(read_pem(path), password=None)
    except TypeError as error:  # what the library raises for a key that wants a passphrase
        raise CertsRefused(f"{path} is encrypted. Keep the authority's key unencrypted on a disk that is.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertsRefused(f"{path} holds no private key in PEM that can be read.") from error
    if not isinstance(key, AuthorityKey):
        raise CertsRefused(f"{path} is neither an EC nor an RSA key.")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_instant(now - CLOCK_SKEW_S))
        .not_valid_after(_instant(now + days * 86_400))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """An authority signs certificates, a node signs handshakes; neither does anything else."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issuer_identifier(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Tells this authority from another of the same name, as there is after `init --force`."""
    try:
        identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        key = authority.public_key()
        assert isinstance(key, (ec.EllipticCurvePublicKey, rsa.RSAPublicKey)), "as its private key was"
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _write(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, force: bool) -> Made:
    """The key first: a crash in between never leaves a new certificate without its key."""
    certificate_path, key_path = _files(stem)
    taken = [str(path) for path in (certificate_path, key_path) if path.exists()]
    if taken and not force:
        raise _taken(", ".join(taken))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    contents = {
        key_path: key.private_bytes(pem, pkcs8, serialization.NoEncryption()),
        certificate_path: certificate.public_bytes(pem),
    }
    try:
        make_private_folder(stem.parent)
        write_private(contents, replace=force)
    except FileExistsError as error:
        raise _taken(error.filename2 or error.filename) from error
    except OSError as error:
        raise CertsRefused(
            f"{certificate_path} and {key_path} cannot be written: {error.strerror or error}."
        ) from error
    return Made(certificate_path, key_path, certificate_facts(certificate, str(certificate_path)))


def _taken(files: str) -> CertsRefused:
    return CertsRefused(
        f"there already: {files}. A key that is overwritten is lost, and with an authority's key all certificates that "
        "it signed. Add --force if that is meant."
    )


def _place(folder: Path, stem: str, out: Path | None) -> Path:
    if out is None:
        return folder / stem
    if out.is_dir():
        return out / stem
    return out.with_suffix("") if out.suffix in (".pem", ".key") else out


def _files(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(f"{stem.name}.pem"), stem.with_name(f"{stem.name}.key")


def _check_days(days: int) -> None:
    if not 1 <= days <= DAYS_LIMIT:
        raise CertsRefused(f"--days must be from 1 to {DAYS_LIMIT}.")


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _instant(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
