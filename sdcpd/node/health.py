"""The operators' port: /metrics, /health and /ready over plain HTTP, on any node (`[metrics]`).

Nothing here names a user or a text, and nothing can be changed, so the port needs no accounts. It is served by the same
listener as the client port, whose limits hold here as well.
"""

import json
from collections.abc import Callable
from typing import Any, Final

from sdcpd.node.metrics import CONTENT_TYPE

Ready = Callable[[], tuple[bool, str]]
"""Whether the node would do its work now, and in words why not."""


class HealthApp:
    """The ASGI application."""

    def __init__(self, ready: Ready, scrape: Callable[[], bytes]) -> None:
        self._ready: Final = ready
        self._scrape: Final = scrape

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        """Serve one request; the listener starts no lifespan."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # becomes 403
            return
        status, kind, body = self.answer(scope["method"], scope["path"])
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        headers.append((b"cache-control", b"no-store"))
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        sent = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": sent, "more_body": False})

    def answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        """Status, media type and body."""
        if path not in ("/metrics", "/health", "/ready"):
            return _json(404, {"detail": "there are /metrics, /health and /ready"})
        if method not in ("GET", "HEAD"):
            return _json(405, {"detail": f"{path} takes GET and HEAD"})
        if path == "/metrics":
            return 200, CONTENT_TYPE, self._scrape()
        if path == "/health":
            return _json(200, {"status": "ok"})
        ready, reason = self._ready()
        return _json(200, {"status": "ready"}) if ready else _json(503, {"status": "not ready", "reason": reason})

    def halt(self) -> None:
        """Nothing here takes long enough to be broken off."""


def _json(status: int, value: dict[str, str]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(value).encode()
