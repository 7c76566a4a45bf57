"""The tools of others against a real port with real roles: curl, nghttp and h2load, which know nothing of us.

They are not Python packages: Debian has them as `curl` and `nghttp2-client`, and CI installs them. Where one is missing
its tests say so and are left out.
"""

import base64
import json
import re
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, Final

import cbor2
import pytest
import trio

from sdcpd.edge.peer_server import PeerServer
from sdcpd.edge.wire_settings import PeerServerSettings
from sdcpd.protocol.encoding import MEDIA_TYPE, encode
from sdcpd.protocol.terms import session_path_id
from tests.edge.wire.doors import client_context, secure
from tests.edge.wire.pki import Authority
from tests.edge.wire.roles import CONTRACT, PROMPT, RolesWorld, roles_world
from tests.edge.wire.world import Served, app_of, echo, tls_world
from tests.support.messages import DRAFTER, ROUTER, SESSION, first_digest, proposal
from tests.support.ports import TrioClock
from tests.support.toy_engine import greedy

ID: Final = session_path_id(SESSION)
CLIENT: Final = "https://f.example/client/"
TOOL_LIMIT_S: Final = 60


def needs(name: str, package: str) -> pytest.MarkDecorator:
    reason = f"{name} is missing: apt-get install {package}"
    return pytest.mark.skipif(shutil.which(name) is None, reason=reason)


def curl_speaks_http_2() -> bool:
    path = shutil.which("curl")
    return path is not None and "HTTP2" in subprocess.run([path, "--version"], capture_output=True, text=True).stdout


needs_curl = pytest.mark.skipif(not curl_speaks_http_2(), reason="curl with HTTP/2 is missing: apt-get install curl")
needs_nghttp = needs("nghttp", "nghttp2-client")
needs_h2load = needs("h2load", "nghttp2-client")


async def run(*command: object) -> str:
    """What a tool says; it must end with 0."""
    with trio.fail_after(TOOL_LIMIT_S):
        done = await trio.run_process(
            [str(word) for word in command], capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
    said = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, said
    return said


class Curl:
    """curl as its user types it, with a certificate for each caller."""

    def __init__(self, authority: Authority, folder: Path, base: str) -> None:
        self._folder = folder
        self._base = base
        self._files = {who: authority.issue(uri) for who, uri in (("r", ROUTER), ("d", DRAFTER), ("f", CLIENT))}

    async def __call__(
        self, who: str, method: str, path: str, body: bytes | None = None, *fields: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, fields and body. Each call makes a connection."""
        files, head, content = self._files[who], self._folder / "head", self._folder / "content"
        content.write_bytes(b"")
        words: list[object] = ["--http2", "--cert", files.certificate, "--key", files.key, "--cacert", files.ca]
        words += ["--request", method, "--dump-header", head, "--output", content]
        if body is not None:
            (self._folder / "body").write_bytes(body)
            words += ["--header", f"content-type: {MEDIA_TYPE}", "--data-binary", f"@{self._folder / 'body'}"]
        for field in fields:
            words += ["--header", field]
        words += ["--write-out", "%{http_version} %{http_code} %{ssl_verify_result}"]
        said = await run("curl", "--silent", "--show-error", *words, self._base + path)
        version, status, verified = said.split()
        assert (version, verified) == ("2", "0")
        lines = [line.partition(":") for line in head.read_text().splitlines()[1:] if line]
        return int(status), {name.lower(): value.strip() for name, _, value in lines}, content.read_bytes()


@needs_curl
async def test_a_session_driven_by_hand_with_curl(authority: Authority, tmp_path: Path) -> None:
    """Bodies made by our encoder; answers read with a CBOR library alone, as another implementation would."""
    (tmp_path / "journal").mkdir()
    async with roles_world(authority, tmp_path / "journal") as w:
        curl = Curl(authority, tmp_path, w.base())
        digest, truth = first_digest(CONTRACT, PROMPT), greedy(PROMPT, 32)

        status, fields, body = await curl("r", "POST", "sessions", encode(w.session_open()))
        assert (status, fields["location"], fields["content-type"]) == (201, f"sessions/{ID}", MEDIA_TYPE)
        fresh = {"session": SESSION, "epoch": 1, "round": 0, "committed": 0, "digest": digest, "state": 2}
        assert cbor2.loads(body).items() >= fresh.items()

        status, _, body = await curl("r", "PUT", f"sessions/{ID}/drafter", encode(w.assignment()))
        assert (status, cbor2.loads(body)["state"]) == (200, 0)

        draft = (*truth[:3], truth[3] + 1)
        proposed = encode(proposal(draft, base_digest=digest))
        status, fields, body = await curl("d", "POST", "proposals", proposed)
        assert (status, fields["content-type"], fields["cache-control"]) == (200, MEDIA_TYPE, "no-store")
        verdict = cbor2.loads(body)
        assert (verdict["accepted"], verdict["emitted"], verdict["committed"]) == (3, truth[:4], 4)
        again, _, repeated = await curl("d", "POST", "proposals", proposed)
        assert (again, repeated) == (200, body), "octet for octet (62)"

        for who in ("f", "r"):
            status, _, body = await curl(who, "GET", f"sessions/{ID}/output?from=1", None, "prefer: wait=1")
            page = cbor2.loads(body)
            assert (status, page["from"], page["tokens"], page["final"]) == (200, 1, truth[1:4], False)

        status, fields, body = await curl("d", "POST", "proposals", encode(proposal((5,), round=2)))
        problem = json.loads(body)
        assert (status, fields["content-type"]) == (409, "application/problem+json")
        assert problem["type"].endswith("#sdcp-stale-base")
        padded = problem["session-state"] + "=" * (-len(problem["session-state"]) % 4)
        state = cbor2.loads(base64.urlsafe_b64decode(padded))
        assert (state["round"], state["committed"], state["digest"]) == (1, 4, verdict["digest"])

        resynchronized = proposal(tuple(truth[4:6]), round=2, base=4, base_digest=state["digest"])
        status, _, body = await curl("d", "POST", "proposals", encode(resynchronized))
        assert (status, cbor2.loads(body)["emitted"]) == (200, truth[4:7])

        assert (await curl("d", "DELETE", f"sessions/{ID}"))[0] == 403
        status, fields, body = await curl("r", "DELETE", f"sessions/{ID}")
        assert (status, body) == (204, b"")
        status, _, body = await curl("f", "GET", f"sessions/{ID}/output?from=4")
        last = cbor2.loads(body)
        assert (last["tokens"], last["final"], last["finish"], last["reason"]) == (truth[4:7], True, 5, "cancelled")
        assert (await curl("d", "POST", "proposals", encode(proposal((5,), round=3))))[0] == 410


@needs_curl
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--http2"], 56),  # no certificate; with TLS 1.3 that is heard while reading
        (["--http2", "--tls-max", "1.2", "CERT"], 35),
        (["--http1.1", "CERT"], 56),
        (["--http2", "CERT", "--cacert", "/dev/null"], 77),
    ],
)
async def test_whom_the_port_does_not_talk_to(words: list[str], code: int, authority: Authority) -> None:
    """Each ends in the connection, none in an answer, whatever number this curl has for it."""
    files = authority.issue(ROUTER)
    async with tls_world(authority) as world:
        served = await world.serve(bulk=False)
        command = ["curl", "--silent", "--show-error", "--cacert", files.ca]
        for word in words:
            command += ["--cert", files.certificate, "--key", files.key] if word == "CERT" else [word]
        done = await trio.run_process(
            [*command, "--write-out", "%{http_code}", served.base() + "x"],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        assert done.stdout.endswith(b"000")
        assert done.returncode in {code, 16, 35, 52, 55, 56, 92}, done.stderr


async def prepared(w: RolesWorld, folder: Path) -> Path:
    """A session with a decided round; the file with its proposal, which is answered by the same verdict for ever."""
    router, drafter = await w.calls_as(ROUTER), await w.calls_as(DRAFTER)
    await router.open_session(w.base(), w.session_open())
    await router.name_drafter(w.base(), w.assignment())
    made = proposal(tuple(greedy(PROMPT, 4)), base_digest=first_digest(CONTRACT, PROMPT))
    await drafter.propose(w.base(), made)
    path = folder / "proposal.cbor"
    path.write_bytes(encode(made))
    return path


@needs_nghttp
async def test_nghttp_sees_no_fault(authority: Authority, tmp_path: Path) -> None:
    """Each frame as nghttp2 reads it: 40 proposals at once on a connection; no RST_STREAM, no GOAWAY from us."""
    (tmp_path / "journal").mkdir()
    async with roles_world(authority, tmp_path / "journal") as w:
        body, files = await prepared(w, tmp_path), authority.issue(DRAFTER)
        tls = ["--cert", files.certificate, "--key", files.key]
        content = ["--data", body, "--header", f"content-type: {MEDIA_TYPE}"]
        said = await run("nghttp", "-nv", "-m", 40, *tls, *content, w.base() + "proposals")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
        assert "The negotiated protocol: h2" in plain
        assert len(re.findall(r"recv \(stream_id=\d+\) :status: 200", plain)) == 40
        assert "recv RST_STREAM" not in plain
        assert "recv GOAWAY" not in plain
        assert "ERROR" not in plain.upper().replace("ERROR_CODE=NO_ERROR", "")


@needs_nghttp
async def test_nghttp_moves_large_bodies_both_ways(authority: Authority, tmp_path: Path) -> None:
    """4 MiB there and back: more than all windows."""
    content = tmp_path / "content"
    content.write_bytes(bytes(range(256)) * (16 << 10))
    async with tls_world(authority) as world:
        served, files = await world.serve(), authority.issue(DRAFTER)
        tls = ["--cert", files.certificate, "--key", files.key]
        with trio.fail_after(TOOL_LIMIT_S):
            done = await trio.run_process(
                ["nghttp", *tls, "--data", str(content), "--no-verify-peer", served.base() + "x"], capture_stdout=True
            )
        assert done.stdout == content.read_bytes()


@needs_nghttp
async def test_nghttp_is_refused_with_a_problem_and_no_fault(authority: Authority, tmp_path: Path) -> None:
    """A body over its limit is answered before it was read: 413, then RST_STREAM with NO_ERROR (RFC 9113, 8.1)."""
    content = tmp_path / "content"
    content.write_bytes(bytes(3 << 20))
    (tmp_path / "journal").mkdir()
    async with roles_world(authority, tmp_path / "journal") as w:
        files = authority.issue(DRAFTER)
        tls = ["--cert", files.certificate, "--key", files.key]
        said = await run("nghttp", "-nv", *tls, "--data", content, w.base() + "proposals")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
        assert ":status: 413" in plain
        resets = re.findall(r"recv RST_STREAM.*?\n.*?error_code=(\w+)", plain)
        assert resets in ([], ["NO_ERROR"])
        assert "recv GOAWAY" not in plain


class Relay:
    """Puts a client certificate before a tool that knows none: plain TCP in, TLS to the port out."""

    def __init__(self, served: Served, context: ssl.SSLContext) -> None:
        self._served = served
        self._context = context

    async def __call__(self, plain: trio.SocketStream) -> None:
        async with await secure(self._served, self._context) as coded:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, plain, coded, nursery.cancel_scope)
                nursery.start_soon(self._pump, coded, plain, nursery.cancel_scope)

    async def _pump(self, source: Any, sink: Any, both: trio.CancelScope) -> None:
        try:
            while octets := await source.receive_some():
                await sink.send_all(octets)
        except trio.BrokenResourceError:
            pass
        both.cancel()


async def loaded(base: str, requests: int, *words: object) -> dict[str, int]:
    """What h2load counted: all requests done, none failed, all of them 2xx."""
    said = await run("h2load", "-n", requests, *words, base)
    line = next(line for line in said.splitlines() if line.startswith("requests:"))
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", line)}
    assert counts == dict.fromkeys(("total", "started", "done", "succeeded"), requests) | dict.fromkeys(
        ("failed", "errored", "timeout"), 0
    ), said
    assert re.search(rf"status codes: {requests} 2xx, 0 3xx, 0 4xx, 0 5xx", said), said
    return counts


@needs_h2load
async def test_h2load_over_tls(authority: Authority, tmp_path: Path) -> None:
    """More than a thousand proposals on each of two connections, sixteen at once. h2load has no client certificates."""
    (tmp_path / "journal").mkdir()
    async with roles_world(authority, tmp_path / "journal", limit_s=90) as w:
        body, files = await prepared(w, tmp_path), authority.issue(DRAFTER)
        relay = Relay(w.served, client_context(files, files.ca))
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        w.world.nursery.start_soon(trio.serve_listeners, relay, [listener])
        port = listener.socket.getsockname()[1]
        before = w.served.server.connections
        content = ["-d", body, "-H", f"content-type: {MEDIA_TYPE}"]
        await loaded(f"http://127.0.0.1:{port}/verifier/proposals", 2400, "-c", 2, "-m", 16, *content)
        with trio.fail_after(5):
            while w.served.server.connections > before:
                await trio.sleep(0.02)
        assert w.served.app.under_way == 0


@needs_h2load
async def test_h2load_without_tls(tmp_path: Path) -> None:
    """`insecure_loopback`: many connections, many streams, bodies and none, up to the limit of streams."""
    app, failures = app_of({"verifier": echo})
    server = PeerServer(app, PeerServerSettings(insecure_loopback=True, listen="127.0.0.1:0"), TrioClock(), None)
    content = tmp_path / "content"
    content.write_bytes(bytes(2000))
    with trio.fail_after(TOOL_LIMIT_S):
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(server.run)
            base = f"http://127.0.0.1:{bound.port}/verifier/x"
            name = ["-H", f"sdcpd-as: {DRAFTER}"]
            await loaded(base, 600, "-c", 20, "-m", 4, *name, "-d", content)
            await loaded(base, 600, "-c", 1, "-m", 500, *name)
            nursery.cancel_scope.cancel()
    assert failures == []
