"""From a request to a role's handler and back (draft 5.1; decisions 7, 28, 33, 34, 117).

What is refused here, in this order: no such resource (404), no such method (405), not for this role (403), a body over
its limit (413), a wrong media type (415), a body that is not the message (400, 422 for a contract). All else is the
handler's; its Problems become problem details.

An exception that is no Problem is our own fault (style rule 7): it is logged with its traceback, counted as a 500, and
goes on up. Within one process it reaches the caller's role and so ends the node; on a wire the server answers 500, of
which the peer learns nothing more, and decides the same.
"""

from typing import ClassVar, Final

import structlog

from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.cache_routes import CacheService, cache_routes
from sdcpd.edge.object_routes import ObjectService, object_routes
from sdcpd.edge.problem_body import problem_response
from sdcpd.edge.routes import (
    DRAFTER_ROUTES,
    ROUTER_ROUTES,
    VERIFIER_ROUTES,
    Call,
    DrafterService,
    Route,
    RouterService,
    VerifierService,
)
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.problems import Forbidden, NotAssigned, Problem, TooLarge, UnknownResource
from sdcpd.roles.ports import Meters, Peer

log = structlog.get_logger(__name__)

PATH_LIMIT_CHARACTERS: Final = 2048
"""As references; a longer path names nothing."""


class MethodNotAllowed(Problem):
    """The resource is there, the method is not; `allow` are those that are."""

    status: ClassVar[int] = 405
    title: ClassVar[str] = "Method not allowed"

    def __init__(self, allow: tuple[str, ...]) -> None:
        super().__init__(f"this resource takes {', '.join(allow)}")
        self.allow = allow


class Dispatcher:
    """The resources of one role of this node."""

    def __init__(self, role: str, service: object, routes: tuple[Route, ...], meters: Meters) -> None:
        """Use the functions below, which know what each role's service must be."""
        self._role = role
        self._service = service
        self._fixed: Final[dict[str, list[Route]]] = {}  # by the path, where it is always the same
        self._shapes: Final[dict[int, list[tuple[list[str], Route]]]] = {}  # by the number of path segments
        for route in routes:
            shape = route.pattern.split("/")
            if "*" in shape:
                self._shapes.setdefault(len(shape), []).append((shape, route))
            else:
                self._fixed.setdefault(route.pattern, []).append(route)
        self._meters = meters

    def body_limit_bytes(self, method: str, path: str) -> int:
        """How much of a body is worth reading (0 where it will be refused anyhow)."""
        try:
            return self._route(method, path).body_limit_bytes
        except Problem:
            return 0

    async def handle(self, peer: Peer, request: Request) -> Response:
        """Answer one request. Whatever is raised here is our fault, not the peer's."""
        operation, accept = "unknown", request.headers.get("accept", "")
        try:
            route = self._route(request.method, request.path)
            operation = route.operation
            _admit(route, peer, request)
            response = await route.call(self._service, Call(peer=peer, request=request))
        except MethodNotAllowed as problem:
            refused = problem_response(problem, accept)
            headers = dict(refused.headers) | {"allow": ", ".join(problem.allow)}
            response = Response(status=refused.status, headers=headers, body=refused.body)
        except Problem as problem:
            response = problem_response(problem, accept)
        except Exception as error:
            log.error("handler failed", role=self._role, operation=operation, caller=peer.role, exc_info=error)
            self._meters.count("peer_requests_total", operation=operation, status="500")
            raise
        self._meters.count("peer_requests_total", operation=operation, status=str(response.status))
        return response

    def _route(self, method: str, path: str) -> Route:
        if len(path) > PATH_LIMIT_CHARACTERS:
            raise UnknownResource("no such resource")
        here = self._fixed.get(path)
        if here is None:
            segments = path.split("/")
            here = [route for shape, route in self._shapes.get(len(segments), ()) if _matches(shape, segments)]
        if not here:
            raise UnknownResource("no such resource")
        for route in here:
            if route.method == method:
                return route
        raise MethodNotAllowed(tuple(sorted(route.method for route in here)))


def _matches(shape: list[str], segments: list[str]) -> bool:
    """`*` stands for any segment but an empty one; both are of one length."""
    for want, have in zip(shape, segments, strict=True):  # noqa: SIM110  # asked for each request: no generator
        if want != have and (want != "*" or have == ""):
            return False
    return True


def _admit(route: Route, peer: Peer, request: Request) -> None:
    """Who may come, with how much (decisions 33, 112, 117)."""
    if peer.role not in route.callers:
        if route.operation == "propose":  # the draft's first step: whoever it is, it is not the drafter named (6.3)
            raise NotAssigned(f"role {peer.role} is not assigned to any session")
        raise Forbidden(f"role {peer.role} may not call {route.operation}")
    if len(request.body) > route.body_limit_bytes:
        raise TooLarge(f"the body may hold {route.body_limit_bytes} octets")


def verifier_dispatcher(service: VerifierService, meters: Meters) -> Dispatcher:
    """The resources of a verifier (Table 1; decision 37)."""
    return Dispatcher("verifier", service, VERIFIER_ROUTES, meters)


def drafter_dispatcher(service: DrafterService, meters: Meters) -> Dispatcher:
    """The resources of a drafter (Table 1; decision 45)."""
    return Dispatcher("drafter", service, DRAFTER_ROUTES, meters)


def router_dispatcher(service: RouterService, meters: Meters) -> Dispatcher:
    """The resources of a router for its instances (Table 1)."""
    return Dispatcher("router", service, ROUTER_ROUTES, meters)


def cache_dispatcher(service: CacheService, settings: CacheSettings, meters: Meters) -> Dispatcher:
    """The resources of a cache (cache part of the decisions)."""
    return Dispatcher("cache", service, cache_routes(settings), meters)


def object_cache_dispatcher(service: ObjectService, settings: CacheSettings, meters: Meters) -> Dispatcher:
    """The objects of a node that has not the role `cache` (decision 112)."""
    return Dispatcher("cache", service, object_routes(settings), meters)
