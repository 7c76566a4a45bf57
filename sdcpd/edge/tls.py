"""TLS 1.3 with client certificates, both ways: the contexts of a node, made from three files and made again on reload.

A node has one certificate, with which it serves and calls. What holds for both directions: TLS 1.3 only, HTTP/2 only
(ALPN `h2`), the other side must show a certificate that the operator's CA signed. Whom such a certificate speaks for
is identity.py's. Sessions are not resumed: a resumed one would not look at certificates again.

New files are tried before they are used: contexts made from them perform a handshake with each other in memory, which
finds a key of another certificate, a certificate that this CA did not sign or that has expired, or that may not serve
or call, and yields the node's own names. What fails leaves the old contexts in place. Connections keep the context
that they were made with; the server and the client can be told to renew theirs (`retire`).
"""

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

from sdcpd.edge.identity import (
    CertificateNames,
    PeerRole,
    canonical_roles,
    certificate_names,
    names_server,
    unnamed,
)

ALPN: Final = "h2"
EXPIRES_SOON_S: Final = 14 * 86_400
"""Time for an operator to notice a warning and to hand new certificates to all nodes, with a holiday in between."""

HANDSHAKE_FLIGHTS: Final = 8
"""More than a handshake has turns."""


class TlsRefused(Exception):
    """The files cannot be used. The text says which, and why; an operator can mend it."""


class TlsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of this node, and how its peers' certificates are read."""

    certificate: str
    """The node's certificate, followed by intermediate ones if there are any."""
    key: str
    """Its private key, not encrypted: a daemon has nobody to ask for a passphrase."""
    ca: str
    """The certificates of the authorities that sign those of all nodes, and nothing else."""
    roles: dict[str, PeerRole] = {}
    """Roles of peers whose SAN URI does not end in one (decision 112): URI to role."""
    host_match: bool = False
    """A server whose certificate carries no URI is known by the name or address of its host. Only where one instance
    runs per host (decision 32)."""


class OwnCertificate(Struct, frozen=True):
    """What a node's certificate says. `expires_s`: Unix time."""

    names: CertificateNames
    expires_s: float


class _Loaded(Struct, frozen=True):
    server: ssl.SSLContext
    client: ssl.SSLContext
    own: OwnCertificate


class Tls:
    """The contexts of one node. `must_name`: base URIs of its roles, which its certificate must carry."""

    def __init__(self, settings: TlsSettings, must_name: Iterable[str] = ()) -> None:
        """Raises TlsRefused."""
        self.settings: Final = settings
        self.roles: Final = canonical_roles(settings.roles)
        self._must_name: Final = tuple(must_name)
        self._loaded = _load(settings, self._must_name)

    @property
    def server(self) -> ssl.SSLContext:
        """For the next connection that is accepted."""
        return self._loaded.server

    @property
    def client(self) -> ssl.SSLContext:
        """For the next connection that is made."""
        return self._loaded.client

    @property
    def own(self) -> OwnCertificate:
        """The certificate in use."""
        return self._loaded.own

    def reload(self) -> str | None:
        """Read the files again. None, or why the old contexts stay."""
        try:
            self._loaded = _load(self.settings, self._must_name)
        except TlsRefused as refused:
            return str(refused)
        return None

    def names_server(self, names: CertificateNames, base_uri: str, host: str) -> bool:
        """Is a server with these names the one at `base_uri`?"""
        return names_server(names, base_uri, host, host_match=self.settings.host_match)


def _load(settings: TlsSettings, must_name: tuple[str, ...]) -> _Loaded:
    _check_readable("tls.ca", settings.ca)
    server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
    server.num_tickets = 0
    own = _rehearse(server, client, settings)
    missing = unnamed(own.names, must_name)
    if missing and not (settings.host_match and not own.names.uris):
        raise TlsRefused(
            f"tls.certificate = {settings.certificate} does not carry the URI {' nor '.join(missing)}, by which peers "
            "know this node. Have one issued with a URI for each of its roles."
        )
    return _Loaded(server=server, client=client, own=own)


def _context(protocol: int, settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # identity.names_server knows better than a host name
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([ALPN])
    try:
        context.load_verify_locations(settings.ca)
    except ssl.SSLError as error:
        raise TlsRefused(f"tls.ca = {settings.ca} holds no certificates in PEM: {_reason(error)}") from error
    load_chain(context, settings.certificate, settings.key, "tls")
    return context


def load_chain(context: ssl.SSLContext, certificate: str, key: str, table: str) -> None:
    """Give a context its own certificate. `table`: where the settings stand, for messages. Raises TlsRefused."""
    _check_readable(f"{table}.certificate", certificate)
    _check_readable(f"{table}.key", key)

    def no_passphrase() -> str:
        raise TlsRefused(f"{table}.key is encrypted. Keep it unencrypted, readable by sdcpd's user alone.")

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        raise TlsRefused(
            f"{table}.certificate = {certificate} and {table}.key = {key} are not a certificate and its own "
            f"key in PEM: {_reason(error)}"
        ) from error


def _check_readable(field: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:  # the ssl module would not say which file
        raise TlsRefused(f"{field} = {path} cannot be read: {error.strerror}") from error


def _rehearse(server: ssl.SSLContext, client: ssl.SSLContext, settings: TlsSettings) -> OwnCertificate:
    """A handshake of the node with itself. Raises TlsRefused."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for _ in range(HANDSHAKE_FLIGHTS):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLError as error:
        raise TlsRefused(
            f"tls.certificate = {settings.certificate} does not stand a handshake with tls.ca = {settings.ca}: "
            f"{_reason(error)}"
        ) from error
    certificate = ends[0].getpeercert()
    assert certificate is not None, "the server has shown one"
    not_after = certificate["notAfter"]
    assert isinstance(not_after, str), "as getpeercert documents it"
    return OwnCertificate(names=certificate_names(certificate), expires_s=ssl.cert_time_to_seconds(not_after))


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).replace("_", " ").lower()
