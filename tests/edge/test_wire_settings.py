"""Settings of the wire: addresses, and what is refused."""

import msgspec
import pytest

from sdcpd.edge.wire_settings import PeerClientSettings, PeerServerSettings, is_loopback, split_listen


@pytest.mark.parametrize(
    ("listen", "address"),
    [("127.0.0.1:8470", ("127.0.0.1", 8470)), ("[::1]:0", ("::1", 0)), ("v.example:65535", ("v.example", 65535))],
)
def test_addresses(listen: str, address: tuple[str, int]) -> None:
    assert split_listen(listen) == address
    assert PeerServerSettings(listen=listen).listen == listen


@pytest.mark.parametrize("listen", ["", "8470", ":8470", "h:", "h:x", "h:65536", "::1:80", "h:-1", "h:²"])
def test_what_is_no_address_is_refused_with_an_example(listen: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="for example"):
        msgspec.convert({"listen": listen}, PeerServerSettings)


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "", "127.0.0.1.x"))


def test_unknown_and_senseless_settings_are_refused() -> None:
    for settings, kind in (
        ({"max_conections": 1}, PeerServerSettings),
        ({"streams_per_connection": 1000}, PeerServerSettings),
        ({"handshake_timeout_s": 0}, PeerServerSettings),
        ({"verify": False}, PeerClientSettings),
        ({"max_connections": 0}, PeerClientSettings),
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(settings, kind)
