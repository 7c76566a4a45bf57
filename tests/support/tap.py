"""What the roles of a cluster say to each other, as it goes over the loopback network."""

import pytest
from msgspec import Struct

from sdcpd.edge.transport import LoopbackNetwork, Request, Response
from sdcpd.roles.ports import Peer


class Exchange(Struct, frozen=True):
    """One request that was answered. `base_uri` is the callee's."""

    caller: Peer
    base_uri: str
    request: Request
    response: Response

    @property
    def what(self) -> str:
        """Method and path, the session's or instance's name left out."""
        parts = self.request.path.split("/")
        if len(parts) > 1 and parts[0] in ("sessions", "assignments", "instances"):
            parts[1] = "*"
        return f"{self.request.method} {'/'.join(parts)}"


def listen(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """From now on every exchange of this process is noted, in the order of the answers."""
    heard: list[Exchange] = []
    carry = LoopbackNetwork.carry

    async def tapped(self: LoopbackNetwork, caller: Peer, base_uri: str, request: Request) -> Response:
        response = await carry(self, caller, base_uri, request)
        heard.append(Exchange(caller, base_uri, request, response))
        return response

    monkeypatch.setattr(LoopbackNetwork, "carry", tapped)
    return heard
