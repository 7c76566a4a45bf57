"""Base URIs have one spelling (decisions 27, 31)."""

import pytest

from sdcpd.protocol.uris import beside, join, normalize_base_uri


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("https://h/sdcp", "https://h/sdcp/"),
        ("HTTPS://Node-1.Example:443/Verifier", "https://node-1.example/Verifier/"),
        ("http://h:80", "http://h/"),
        ("http://h:443/", "http://h:443/"),
        ("https://h:8443/a/b/", "https://h:8443/a/b/"),
        ("http://[::1]:9000/cache", "http://[::1]:9000/cache/"),
        ("http://[0:0:0:0:0:0:0:1]/", "http://[::1]/"),
        ("http://127.0.0.1:8711/router/", "http://127.0.0.1:8711/router/"),
        ("https://h/a%2Fb", "https://h/a%2Fb/"),
    ],
)
def test_one_spelling(text: str, canonical: str) -> None:
    assert normalize_base_uri(text) == canonical
    assert normalize_base_uri(canonical) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h/sdcp",
        "ftp://h/",
        "https:///path",
        "https://user@h/",
        "https://user:password@h/",
        "https://h/?a=1",
        "https://h/#f",
        "https://h/?",
        "https://h//a/",
        "https://h/a/../b/",
        "https://h/./",
        "https://h/%zz/",
        "https://h/a b/",
        "https://h/ü/",
        "https://hä/",
        "https://h:0/",
        "https://h:65536/",
        "https://h:/",
        "https://h:x/",
        "https://[::1/",
        "https://[::g]/",
        "https://h/\n",
        "https://-h/",
        "https://h\\x/",
        "https://h/" + "a" * 1024,
    ],
)
def test_what_is_no_base_uri(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several checks, one meaning
        normalize_base_uri(text)


def test_join_keeps_the_last_segment_of_the_base() -> None:
    """RFC 3986 resolution of `sessions` against https://h/sdcp would drop `sdcp`."""
    assert join(normalize_base_uri("https://h/sdcp"), "sessions") == "https://h/sdcp/sessions"


@pytest.mark.parametrize("text", ["http://[::1::2]/", "http://[fe80::g]/", "http://[:::]/", "http://[v1.a:b]/"])
def test_ill_formed_ipv6_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"IPv6|Invalid|address"):
        normalize_base_uri(text)


def test_another_role_beside_one() -> None:
    assert beside("https://d.example:8470/drafter/", "cache") == "https://d.example:8470/cache/"
    assert beside("https://d.example/x/drafter/", "cache") == "https://d.example/x/cache/"
