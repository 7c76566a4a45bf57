"""Cross-origin requests (the Fetch standard's CORS protocol): which pages in a browser may call this port.

Off unless origins are listed: then a page of such an origin may send requests with a key in `Authorization` and read
the answers. Cookies are never used, so credentials mode stays off. An origin that is not listed gets an ordinary answer
without these headers, which its browser keeps from the page.
"""

from typing import Final

METHODS: Final = "GET, POST"
READABLE: Final = "x-request-id, x-sdcp-session, retry-after"
PREFLIGHT_AGE_S: Final = 600
"""How long a browser may remember a preflight: Chromium's limit is two hours, ours that of a key or list changing."""

Headers = tuple[tuple[str, str], ...]


class Cors:
    """The rule of one port."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """As in the settings: origins, or "*"."""
        self._origins: Final = frozenset(origins)

    def headers(self, origin: str | None) -> Headers:
        """What an answer to a request of this origin carries."""
        if not self._origins:
            return ()
        if origin is None or not ({origin, "*"} & self._origins):
            return (("vary", "origin"),)
        return (
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", READABLE),
            ("vary", "origin"),
        )

    def preflight(self, origin: str | None, asked: str | None) -> Headers | None:
        """What the answer to an OPTIONS carries; None where the origin may not call. `asked`: the headers it names."""
        allowed = self.headers(origin)
        if len(allowed) < 2:
            return None
        return (
            *allowed,
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", asked or "authorization, content-type"),
            ("access-control-max-age", str(PREFLIGHT_AGE_S)),
        )
