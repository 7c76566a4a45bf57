"""Hosts of certificates: one spelling each, and no name that means something else elsewhere."""

import pytest

from sdcpd.node.cert_hosts import CertHost, HostRefused, parse_host


@pytest.mark.parametrize(
    ("text", "uri", "stem"),
    [
        ("h.example", "https://h.example/router/", "h.example"),
        ("H.Example:8470", "https://h.example:8470/router/", "h.example-8470"),
        ("h.example:443", "https://h.example/router/", "h.example"),
        ("localhost:8470", "https://localhost:8470/router/", "localhost-8470"),
        ("node_1.cluster-2:8470", "https://node_1.cluster-2:8470/router/", "node_1.cluster-2-8470"),
        ("192.0.2.7:8470", "https://192.0.2.7:8470/router/", "192.0.2.7-8470"),
        ("[::1]:8470", "https://[::1]:8470/router/", "--1-8470"),
        ("[2001:DB8:0::7]", "https://[2001:db8::7]/router/", "2001-db8--7"),
    ],
)
def test_one_spelling(text: str, uri: str, stem: str) -> None:
    host = parse_host(text)
    assert host.role_uri("router") == uri
    assert host.file_stem == stem


def test_kinds() -> None:
    assert parse_host("h.example").address is None
    assert str(parse_host("192.0.2.7").address) == "192.0.2.7"
    assert str(parse_host("[2001:db8::7]:1").address) == "2001:db8::7"
    assert parse_host("h.example") == CertHost("h.example", 443)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "host name"),
        (":8470", "host name"),
        ("h.example:", "port"),
        ("h.example:0", "port"),
        ("h.example:65536", "port"),
        ("h.example:84a", "port"),
        ("h.example:-1", "port"),
        ("h.example:\N{ARABIC-INDIC DIGIT EIGHT}", "port"),
        ("h..example", "host name"),
        ("h.example.", "host name"),
        ("-h.example", "host name"),
        ("h-.example", "host name"),
        ("h example", "host name"),
        ("h.example\n", "host name"),
        ("a" * 64 + ".example", "host name"),
        (".".join(["a" * 60] * 5), "host name"),
        ("user@h.example", "host name"),
        ("*.example", "wildcards"),
        ("k\N{LATIN SMALL LETTER O WITH DIAERESIS}ln.example", "xn--"),
        ("192.0.2.256:8470", "IPv4"),
        ("192.0.02.7", "IPv4"),
        ("1.2.3", "IPv4"),
        ("::1", "brackets"),
        ("2001:db8::7:8470", "brackets"),
        ("[::1", "with or without a port"),
        ("[::1]8470", "with or without a port"),
        ("[192.0.2.7]:8470", "IPv6"),
        ("[::g]:1", "IPv6"),
        ("[fe80::1%eth0]:1", "zone"),
        ("https://h.example/router/", "URI"),
    ],
)
def test_bad_names_are_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(HostRefused, match=said):
        parse_host(text)
