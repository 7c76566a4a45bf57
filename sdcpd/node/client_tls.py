"""The client port's certificate: TLS 1.2 and above, for clients that have none of their own and may be anybody's.

As at the SDCP port, new files are tried before they are used, and connections keep the context they were made with.
What cannot be tried is whether clients trust the certificate: their authorities are not known here.
"""

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509

from sdcpd.edge.tls import TlsRefused, load_chain
from sdcpd.frontend.settings import ClientTlsSettings

ALPN: Final = ("h2", "http/1.1")
TABLE: Final = "frontend.tls"


class ClientTls:
    """The context of the next connection, made from two files and made again on reload."""

    def __init__(self, settings: ClientTlsSettings) -> None:
        """Raises TlsRefused."""
        self._settings: Final = settings
        self._context, self.expires_s = _load(settings)

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._context

    def reload(self) -> str | None:
        """Read the files again. None, or why the old ones stay."""
        try:
            self._context, self.expires_s = _load(self._settings)
        except TlsRefused as refused:
            return str(refused)
        return None


def _load(settings: ClientTlsSettings) -> tuple[ssl.SSLContext, float]:
    """The context, and when its certificate expires in Unix time. Raises TlsRefused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(ALPN))
    load_chain(context, settings.certificate, settings.key, TABLE)
    certificate = x509.load_pem_x509_certificate(Path(settings.certificate).read_bytes())
    expires = certificate.not_valid_after_utc
    if expires <= datetime.now(UTC):
        raise TlsRefused(f"{TABLE}.certificate = {settings.certificate} has expired, on {expires:%Y-%m-%d}")
    return context, expires.timestamp()
