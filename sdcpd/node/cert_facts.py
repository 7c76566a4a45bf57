"""What certificates in PEM files say, and for how much longer they hold. Needs the `cryptography` library."""

from pathlib import Path
from typing import Final, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtensionOID
from msgspec import Struct

from sdcpd.edge.identity import role_of
from sdcpd.edge.tls import EXPIRES_SOON_S
from sdcpd.protocol.uris import normalize_base_uri

DAY_S: Final = 86_400
PEM_LIMIT_BYTES: Final = 1 << 20
"""A thousand certificates; a longer file is something else."""

PEM_MARK: Final = b"-----BEGIN CERTIFICATE-----"

State = Literal["good", "expires soon", "expired", "not yet valid"]


class CertsRefused(Exception):
    """What was asked of certificates cannot be done. The text says why, and what to do."""


class CertificateFacts(Struct, frozen=True):
    """One certificate. Times are Unix seconds; `roles` are those of the URIs, by decision 112 alone."""

    file: str
    subject: str
    issuer: str
    authority: bool
    uris: tuple[str, ...]
    hosts: tuple[str, ...]
    roles: tuple[str, ...]
    not_before_s: float
    not_after_s: float
    serial: str
    sha256: str
    """Of the whole certificate, as lower-case hexadecimal digits: its fingerprint."""

    def state(self, now: float) -> State:
        """Whether it holds at `now`, Unix time."""
        if now < self.not_before_s:
            return "not yet valid"
        if now >= self.not_after_s:
            return "expired"
        return "expires soon" if self.not_after_s - now <= EXPIRES_SOON_S else "good"

    def days_left(self, now: float) -> float:
        """Below zero when it has expired."""
        return (self.not_after_s - now) / DAY_S


def certificate_facts(certificate: x509.Certificate, file: str) -> CertificateFacts:
    """What a certificate says. Raises ValueError when it is not well-formed within."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris = [_canonical(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
    hosts = names.get_values_for_type(x509.DNSName)
    hosts += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return CertificateFacts(
        file=file,
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        authority=is_authority(certificate),
        uris=tuple(uris),
        hosts=tuple(hosts),
        roles=tuple(role for uri in uris if (role := role_of(uri, {})) is not None),
        not_before_s=certificate.not_valid_before_utc.timestamp(),
        not_after_s=certificate.not_valid_after_utc.timestamp(),
        serial=f"{certificate.serial_number:x}",
        sha256=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _canonical(uri: str) -> str:
    try:
        return normalize_base_uri(uri)
    except ValueError:
        return uri  # not a base URI; an operator's map may know it (decision 32)


def is_authority(certificate: x509.Certificate) -> bool:
    """May it sign others?"""
    try:
        found = certificate.extensions.get_extension_for_oid(ExtensionOID.BASIC_CONSTRAINTS).value
    except x509.ExtensionNotFound:
        return False
    return isinstance(found, x509.BasicConstraints) and found.ca


def read_pem(path: Path) -> bytes:
    """A file's content. Raises CertsRefused."""
    try:
        with path.open("rb") as file:
            octets = file.read(PEM_LIMIT_BYTES + 1)
    except OSError as error:
        raise CertsRefused(f"{path} cannot be read: {error.strerror}.") from error
    if len(octets) > PEM_LIMIT_BYTES:
        raise CertsRefused(f"{path} is longer than {PEM_LIMIT_BYTES} octets; that is no PEM file of ours.")
    return octets


def load_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates of a PEM file, at least one. Raises CertsRefused."""
    try:
        return x509.load_pem_x509_certificates(read_pem(path))
    except ValueError as error:
        raise CertsRefused(f"{path} holds no certificate in PEM that can be read ({error}).") from error


def read_facts(path: Path) -> list[CertificateFacts]:
    """Of each certificate in a PEM file, or in all the PEM files of a folder. Raises CertsRefused."""
    files = _files_with_certificates(path) if path.is_dir() else [path]
    facts = []
    for file in files:
        try:
            facts += [certificate_facts(certificate, str(file)) for certificate in load_certificates(file)]
        except ValueError as error:
            raise CertsRefused(f"{file} holds a certificate that is not well-formed ({error}).") from error
    return facts


def _files_with_certificates(folder: Path) -> list[Path]:
    """By name; files of other content (keys, settings) are passed over."""
    try:
        found = [
            file for file in sorted(folder.iterdir()) if file.suffix in (".pem", ".crt", ".cert") and file.is_file()
        ]
    except OSError as error:
        raise CertsRefused(f"{folder} cannot be read: {error.strerror}.") from error
    found = [file for file in found if PEM_MARK in read_pem(file)]
    if not found:
        raise CertsRefused(
            f"{folder} holds no certificates. Make an authority there: sdcpctl certs init --dir {folder}"
        )
    return found


def expires_in_s(path: Path, now: float) -> float:
    """Seconds until the first certificate of a PEM file expires; below zero when one has. Raises CertsRefused.

    For the metric `certificate_expiry_seconds`. `now` is Unix time.
    """
    return min(certificate.not_valid_after_utc.timestamp() for certificate in load_certificates(path)) - now
