"""Base URIs: one canonical form for joining and comparing (decisions 27, 31).

A base URI is both an address and an identity: the same text stands in assignments, proposals, status reports and
certificates. So there is exactly one spelling of each: lower-case scheme and host, no default port, no query, no
fragment, a path without empty or dot segments that ends in `/`. Paths are joined by plain concatenation after that;
RFC 3986 resolution would drop the last segment of a base without the slash.
"""

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

BASE_URI_LIMIT_CHARACTERS: Final = 1024
"""As terms.BaseUri: an identity is kept for as long as its instance or session lives."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_PATH: Final = re.compile(r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+)*/?")


def normalize_base_uri(text: str) -> str:
    """The canonical form of a base URI. Raises ValueError when `text` is not one."""
    if not text or len(text) > BASE_URI_LIMIT_CHARACTERS or not text.isascii() or not text.isprintable():
        raise ValueError(f"base URI must be 1 to {BASE_URI_LIMIT_CHARACTERS} printable ASCII characters")
    parts = urlsplit(text)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(f"base URI {text!r} does not begin with http:// or https://")
    if "?" in text or "#" in text or "@" in parts.netloc:
        raise ValueError(f"base URI {text!r} has a query, a fragment or a user name")
    if not _PATH.fullmatch(parts.path) or any(segment in (".", "..") for segment in parts.path.split("/")):
        raise ValueError(f"base URI {text!r} has an empty, dotted or ill-formed path segment")
    port = parts.port  # raises ValueError itself when out of range
    if port == 0 or (port is None and parts.netloc.endswith(":")):
        raise ValueError(f"base URI {text!r} has no usable port")
    suffix = "" if port is None or port == _DEFAULT_PORTS[parts.scheme] else f":{port}"
    return f"{parts.scheme}://{_host(parts.hostname or '', text)}{suffix}{parts.path.rstrip('/')}/"


def _host(host: str, text: str) -> str:
    if ":" in host:
        try:
            return f"[{ipaddress.IPv6Address(host).compressed}]"
        except ValueError as error:
            raise ValueError(f"base URI {text!r} has an ill-formed IPv6 address") from error
    if not _HOST_NAME.fullmatch(host):
        raise ValueError(f"base URI {text!r} has no well-formed host")
    return host


def join(base: str, path: str) -> str:
    """`path` under a canonical base URI. A path that leaves its base is our own mistake."""
    assert base.endswith("/"), f"{base!r} is not a canonical base URI"
    assert path, "an empty path names no resource"
    assert not path.startswith("/"), f"{path!r} is not relative"
    return base + path


def beside(base: str, role: str) -> str:
    """The base URI of another role on the same node as `base` (decision 112): its last segment replaced."""
    parent, _, _ = base.rstrip("/").rpartition("/")
    return f"{parent}/{role}/"
