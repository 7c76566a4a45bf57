"""Settings of the client port, with their reasons. Composed into the node's file by node/config.py."""

import ipaddress
import re
from typing import Annotated, Final

from msgspec import Meta, Struct

ORIGIN: Final = re.compile(r"https?://[^/\s,]+")
"""As a browser writes the header `Origin`."""

SecondsSetting = Annotated[float, Meta(gt=0, le=86_400)]


class ClientModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that clients may name."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    path: Annotated[str, Meta(min_length=1)]
    """A Hugging Face folder, of which only the text files are read here."""
    ladder: str | None = None
    """Name of the `[ladder.NAME]` by which sessions of this model escalate; without it the router's default."""


class ClientTlsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of the client port. Clients need no certificate; TLS 1.2 and above, since they are not ours."""

    certificate: str
    """The certificate, followed by intermediate ones, signed by an authority that the clients trust."""
    key: str
    """Its private key, not encrypted: a daemon has nobody to ask for a passphrase."""


class FrontendSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The client port. Raises ValueError (a ValidationError while decoding) for combinations that make no sense."""

    listen: str = "127.0.0.1:8000"
    """`host:port`; port 0 takes a free one."""
    tls: ClientTlsSettings | None = None
    """`[frontend.tls]`. Read again on SIGHUP, for new connections."""
    insecure_loopback: bool = False
    """Plain HTTP, on loopback only. Must be said: without TLS keys, prompts and answers can be read on their way."""
    keys: str | None = None
    """File of API keys (keys_file.py), of mode 0600, read again on SIGHUP. Without it nobody is asked for a key."""
    allow_non_loopback: bool = False
    """Must be true to listen anywhere but on loopback without `keys`: whoever reaches the port may use the models."""
    cors_origins: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()
    """Origins whose pages may call this port from a browser, as "https://chat.example"; "*" is all. None by default."""
    models: tuple[ClientModel, ...] = ()
    max_requests: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Completions being read, queued or answered at once; one more is answered 503. Each may hold a body."""
    max_connections: Annotated[int, Meta(ge=1, le=16_384)] = 256
    """One more is closed at once. Each holds a socket and some 64 KiB of buffers."""
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 4 * 1024 * 1024
    """The limit of a session-open (decision 117): a longer prompt could not be passed on anyway."""
    max_prompt_chars: Annotated[int, Meta(ge=1)] = 1_000_000
    """Looked at before tokenizing, which costs about a second for each million characters."""
    body_timeout_s: SecondsSetting = 30
    """For the whole body: a client that dribbles holds one of `max_requests`."""
    stalled_client_timeout_s: SecondsSetting = 30
    """A client that takes none of its answer for so long is taken for gone, and its session ends."""
    idle_connection_timeout_s: SecondsSetting = 75
    """Above the idle time at which common clients drop a connection, so that they never reuse a dying one."""
    keep_alive_s: SecondsSetting = 10
    """A silent stream gets a comment line so often, below the usual read time-outs of proxies."""
    grace_s: SecondsSetting = 5
    """What a stop grants running answers to finish. Those that do not end with the error `server_stopping`."""

    def __post_init__(self) -> None:
        listen_address(self.listen, self.allow_non_loopback or self.keys is not None)
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins: {origin!r} is no origin; write scheme://host[:port], without a path")
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError("models: two entries have the same name; clients choose by it")


def listen_address(listen: str, allow_non_loopback: bool) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port). Raises ValueError with the remedy."""
    host, colon, port_text = listen.rpartition(":")
    if not colon or not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65_535:
        raise ValueError(f"listen = {listen!r} is not host:port, for example 127.0.0.1:8000")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"listen = {listen!r}: write an IPv6 address in brackets, for example [::1]:8000")
    if not allow_non_loopback and not is_loopback(host):
        raise ValueError(
            f"listen = {listen!r} is not a loopback address; name a file of API keys (keys), or set "
            "allow_non_loopback = true if everybody who can reach it may use the models"
        )
    return host, int(port_text)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. Names other than localhost are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
