"""TLS at the client port: both versions of HTTP, what is refused, and another certificate after a reload."""

import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import trio

from sdcpd.edge.tls import TlsRefused
from sdcpd.frontend.server import Bound, FrontendServer
from sdcpd.frontend.settings import ClientTlsSettings, FrontendSettings
from sdcpd.node.client_tls import ClientTls
from tests.edge.wire.pki import HOUR, Authority
from tests.support.frontend import EOS, make_world, page, read_events, tokens_of
from tests.support.ports import TrioClock

ASK = {"model": "m", "prompt": "hi"}


def files(authority: Authority, *, life: datetime.timedelta = HOUR, encrypted: bool = False) -> ClientTlsSettings:
    issued = authority.issue("127.0.0.1", "localhost", life=life, encrypted=encrypted)
    return ClientTlsSettings(certificate=issued.certificate, key=issued.key)


@asynccontextmanager
async def serving(tls: ClientTls) -> AsyncIterator[Bound]:
    """Must be over in 20 s."""
    settings = FrontendSettings(listen="127.0.0.1:0", max_connections=4)
    script = [page(tokens_of("Hel")), page([*tokens_of("lo"), EOS], final=True)]
    server = FrontendServer(make_world(script, settings=settings).app, settings, TrioClock(), tls.context)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(20):
            yield await nursery.start(server.run)
            nursery.cancel_scope.cancel()


def trusting(authority: Authority, **options: object) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.path))
    for name, value in options.items():
        setattr(context, name, value)
    return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tls_version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_of_http(authority: Authority, version: int, tls_version: ssl.TLSVersion) -> None:
    context = trusting(authority, maximum_version=tls_version)
    async with serving(ClientTls(files(authority))) as bound:
        assert bound.url.startswith("https://")
        client = httpx2.AsyncClient(
            base_url=bound.url, http1=version == 1, http2=version == 2, verify=context, trust_env=False
        )
        async with client:
            whole = await client.post("/v1/completions", json=ASK)
            assert whole.http_version == ("HTTP/1.1" if version == 1 else "HTTP/2")
            assert whole.json()["choices"][0]["text"] == "Hello"
            async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as streamed:
                events = read_events(await streamed.aread())
            assert events[-1] == "[DONE]"


async def test_who_does_not_speak_tls_is_dropped_and_others_served(authority: Authority) -> None:
    async with serving(ClientTls(files(authority))) as bound:
        for _ in range(8):  # more than max_connections: none may stay behind
            stream = await trio.open_tcp_stream(bound.host, bound.port)
            async with stream:
                await stream.send_all(b"GET /health HTTP/1.1\r\nHost: n\r\n\r\n")
                answer = b"".join([piece async for piece in stream])
            assert b"200" not in answer
        async with httpx2.AsyncClient(base_url=bound.url, verify=trusting(authority), trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_reload_is_for_new_connections(authority: Authority, tmp_path: Path) -> None:
    first, second = files(authority), files(authority)
    place = ClientTlsSettings(certificate=str(tmp_path / "c.pem"), key=str(tmp_path / "k.pem"))

    def put(source: ClientTlsSettings, *, key: ClientTlsSettings | None = None) -> None:
        Path(place.certificate).write_bytes(Path(source.certificate).read_bytes())
        Path(place.key).write_bytes(Path((key or source).key).read_bytes())

    put(first)
    tls = ClientTls(place)

    def shown(bound: Bound) -> bytes:
        pem = ssl.get_server_certificate((bound.host, bound.port), ca_certs=str(authority.path))
        return ssl.PEM_cert_to_DER_cert(pem)

    def der(settings: ClientTlsSettings) -> bytes:
        return ssl.PEM_cert_to_DER_cert(Path(settings.certificate).read_text())

    async with serving(tls) as bound:
        assert await trio.to_thread.run_sync(shown, bound) == der(first)
        put(second, key=first)
        reason = tls.reload()
        assert reason is not None
        assert "frontend.tls.certificate" in reason
        assert await trio.to_thread.run_sync(shown, bound) == der(first)
        put(second)
        assert tls.reload() is None
        assert await trio.to_thread.run_sync(shown, bound) == der(second)


def test_what_cannot_be_used_is_refused(authority: Authority) -> None:
    good, other = files(authority), files(authority)
    for settings, words in (
        (ClientTlsSettings(certificate="/none", key=good.key), r"frontend.tls.certificate = /none cannot be read"),
        (ClientTlsSettings(certificate=good.certificate, key=other.key), r"not a certificate and its own key"),
        (files(authority, encrypted=True), r"frontend.tls.key is encrypted"),
        (files(authority, life=-HOUR), r"has expired"),
    ):
        with pytest.raises(TlsRefused, match=words):
            ClientTls(settings)
    left_s = ClientTls(good).expires_s - datetime.datetime.now(datetime.UTC).timestamp()
    assert 3500 < left_s <= 3600
