"""Hosts as `sdcpctl certs issue --host` takes them: `name`, `name:port`, `192.0.2.7:port` or `[2001:db8::7]:port`.

A host stands twice in a certificate: as part of the SAN URI of each role, which is the identity that sdcpd goes by
(decision 112), and as a DNS or IP name, for general tools. So it must be well-formed for both.
"""

import ipaddress
import re
from typing import Final

from msgspec import Struct

from sdcpd.protocol.uris import normalize_base_uri

NAME_LIMIT_CHARACTERS: Final = 253
"""Of a host name in DNS."""

HTTPS_PORT: Final = 443
EXAMPLE: Final = "Write h.example, h.example:8470, 192.0.2.7:8470 or [2001:db8::7]:8470."

_PARTS: Final = re.compile(r"(\[(?P<six>[^]]*)\]|(?P<plain>[^:\[]*))(:(?P<port>.*))?")
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class HostRefused(ValueError):
    """Not a host that a node can be known by. The text says how to write one."""


class CertHost(Struct, frozen=True):
    """A host and port in canonical form. `name`: lower case, an IPv6 address without brackets."""

    name: str
    port: int = HTTPS_PORT

    @property
    def address(self) -> Address | None:
        """The host as an IP address, None when it is a DNS name."""
        try:
            return ipaddress.ip_address(self.name)
        except ValueError:
            return None

    def role_uri(self, role: str) -> str:
        """The base URI of a role on this host, in the one spelling that identities are compared in."""
        bracketed = f"[{self.name}]" if ":" in self.name else self.name
        return normalize_base_uri(f"https://{bracketed}:{self.port}/{role}/")

    @property
    def file_stem(self) -> str:
        """The host as a part of a file name: no colons, which scp and others read as something else."""
        port = "" if self.port == HTTPS_PORT else f"-{self.port}"
        return self.name.replace(":", "-") + port


def parse_host(text: str) -> CertHost:
    """Raises HostRefused. Without a port it is 443, the default of https."""
    if "/" in text:
        raise HostRefused(f"{text!r} is a URI or path, not a host. {EXAMPLE}")
    if text.count(":") > 1 and not text.startswith("["):
        raise HostRefused(f"{text!r} looks like an IPv6 address without its brackets. {EXAMPLE}")
    parts = _PARTS.fullmatch(text)
    if parts is None:
        raise HostRefused(f"{text!r} is not a host with or without a port. {EXAMPLE}")
    name = _name(parts["plain"], text) if parts["six"] is None else _address_6(parts["six"], text)
    return CertHost(name=name, port=HTTPS_PORT if parts["port"] is None else _port(parts["port"], text))


def _name(name: str, text: str) -> str:
    name = name.lower()
    if not name.isascii():
        raise HostRefused(f"{text!r}: write a name with letters beyond a to z in its ASCII form, xn--...")
    if "*" in name:
        raise HostRefused(f"{text!r}: a certificate stands for one instance on one host; wildcards name none.")
    labels = name.split(".")
    if len(name) > NAME_LIMIT_CHARACTERS or not all(_LABEL.fullmatch(label) for label in labels):
        raise HostRefused(f"{text!r} is not a well-formed host name. {EXAMPLE}")
    if labels[-1].isdigit():  # no top-level domain is a number: an address was meant
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError as error:
            raise HostRefused(f"{text!r} is not a well-formed IPv4 address. {EXAMPLE}") from error
    return name


def _address_6(text: str, whole: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError as error:
        raise HostRefused(f"{whole!r} is not a well-formed IPv6 address in brackets. {EXAMPLE}") from error
    if address.scope_id is not None:
        raise HostRefused(f"{whole!r}: an address with a zone means something else on every machine.")
    return address.compressed


def _port(port: str, text: str) -> int:
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise HostRefused(f"{text!r}: the port must be a number from 1 to 65535. {EXAMPLE}")
    return int(port)
