"""Certificates for tests, made in milliseconds and valid for an hour unless a test wants otherwise."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sdcpd.edge.tls import TlsSettings

HOUR = datetime.timedelta(hours=1)
PEM = serialization.Encoding.PEM


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(text: str) -> x509.GeneralName:
    if "://" in text:
        return x509.UniformResourceIdentifier(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


class Authority:
    """A CA; its files go to `folder`."""

    def __init__(self, folder: Path, name: str = "test CA") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.certificate = self._signed(x509.BasicConstraints(ca=True, path_length=0), self._name, self._key, (), HOUR)
        self.path = folder / f"{name.replace(' ', '-')}.pem"
        self.path.write_bytes(self.certificate.public_bytes(PEM))
        self._count = 0

    def _signed(
        self,
        constraints: x509.BasicConstraints,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        alternative: Sequence[str],
        life: datetime.timedelta,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * HOUR)
            .not_valid_after(now + life)
            .add_extension(constraints, critical=True)
        )
        if alternative:
            names = x509.SubjectAlternativeName([_general_name(text) for text in alternative])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, *names: str, life: datetime.timedelta = HOUR, encrypted: bool = False) -> TlsSettings:
        """Files of a node whose certificate carries these names, and which trusts this CA."""
        self._count += 1
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(x509.BasicConstraints(ca=False, path_length=None), _name("node"), key, names, life)
        secret = serialization.BestAvailableEncryption(b"secret") if encrypted else serialization.NoEncryption()
        stem = self._folder / f"{self.path.stem}-{self._count}"
        paths = stem.with_suffix(".crt"), stem.with_suffix(".key")
        paths[0].write_bytes(certificate.public_bytes(PEM))
        paths[1].write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, secret))
        return TlsSettings(certificate=str(paths[0]), key=str(paths[1]), ca=str(self.path))
