"""FrontendSettings: where the port may listen, and that nothing unknown passes."""

import msgspec
import pytest

from sdcpd.frontend.settings import FrontendSettings, listen_address


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("127.8.9.10:0", ("127.8.9.10", 0)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_loopback_addresses_are_taken(listen: str, address: tuple[str, int]) -> None:
    assert listen_address(listen, False) == address


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "[::]:8000", "192.168.1.2:8000", "gpu-box:8000", "localhost.:1"])
def test_other_addresses_need_permission(listen: str) -> None:
    with pytest.raises(ValueError, match="allow_non_loopback"):
        listen_address(listen, False)
    listen_address(listen, True)


@pytest.mark.parametrize(
    "listen", ["", "8000", ":8000", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "::1:80"]
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="listen = "):
        listen_address(listen, True)


def test_settings_are_checked_while_they_are_read() -> None:
    assert msgspec.convert({"models": [{"name": "m", "path": "/m"}]}, FrontendSettings).models[0].name == "m"
    for wrong in (
        {"listen": "0.0.0.0:1"},
        {"models": [{"name": "m", "path": "/a"}, {"name": "m", "path": "/b"}]},
        {"port": 8000},
        {"max_requests": 0},
        {"grace_s": 0},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, FrontendSettings)
