"""What an operator may do to a session of a router: `sdcpctl failover | switch | cancel | fence` (draft 6.8, 6.9).

Each takes the path that a failure takes: `failover` injects the loss of the verifier, `switch` the verifier's wish for
another drafter, `cancel` the client's leaving. `fence` writes a fence and nothing else, as another router would: the
verifier can commit nothing more, and whoever cares for the session finds out, stands back and takes it over (89). It
works for sessions of other routers as well, as long as their log is in this router's cache.

A command is answered once it is under way; `sdcpctl show` tells how it goes on.
"""

from collections.abc import Callable, Mapping

import structlog
from msgspec import Struct

from sdcpd.cache.refs import log_reference
from sdcpd.protocol.commit_log import FenceRecord, read_records, write_record
from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.placement_values import Phase
from sdcpd.protocol.problems import Conflict, IllFormed, Overloaded, UnknownResource
from sdcpd.protocol.terms import InstanceRole, session_from_path_id
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.ports import Appended, Content, Missing, Ports
from sdcpd.roles.session_task import SessionTask
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)

CALL_LIMIT_S = 5.0
"""One read or append; the operator waits for it."""


class CommandDone(Struct, frozen=True):
    """What `sdcpctl` prints: what was begun, and where the session stood then. `epoch` is the fence's for `fence`."""

    session: str
    command: str
    state: str
    epoch: int
    verifier: str | None
    drafter: str | None


class RouterCommands:
    """Commands on `sessions`, which is the router's own book; sessions are named as in paths (base64url)."""

    def __init__(
        self,
        sessions: Mapping[bytes, SessionTask],
        fleet: Fleet,
        ports: Ports,
        *,
        instance: str,
        cache: str,
        state_of: Callable[[SessionTask], str],
    ) -> None:
        self._sessions = sessions
        self._fleet = fleet
        self._ports = ports
        self._instance = instance
        self._cache = cache
        self._state_of = state_of
        self._nonces = ports.randomness.stream("operator fences")

    async def fail_over(self, session: str, to: str | None = None) -> CommandDone:
        """Take the session from its verifier, to `to` if that is named. Raises Problem."""
        task = self._task(session)
        if to is not None:
            to = self._verifier(to, task)
        if task.placement.phase is Phase.ENDING:
            raise Conflict("the session has ended; its last tokens are being read")
        task.command(lambda now: task.placement.fail_over(now, to))
        return self._done("failover", task, session)

    async def switch(self, session: str) -> CommandDone:
        """Have another drafter named. Raises Problem."""
        task = self._task(session)
        if not task.placement.speculates:
            raise Conflict("speculation is off for the session; it has no drafter to switch")
        if task.placement.phase in (Phase.OPENING, Phase.RECOVERING, Phase.ENDING):
            state = self._state_of(task)
            raise Conflict(f"the session is {state}; try again when `sdcpctl show` says drafting or self_decoding")
        task.command(task.placement.switch)
        return self._done("switch", task, session)

    async def cancel(self, session: str) -> CommandDone:
        """End the session, for its client too. Raises Problem."""
        task = self._task(session)
        task.leave()
        return self._done("cancel", task, session)

    async def fence(self, session: str) -> CommandDone:
        """Write a fence above the highest epoch of the session's log. Raises Problem."""
        task = self._sessions.get(_session_id(session))
        ref = (
            task.placement.plan.commit_log
            if task is not None
            else log_reference(self._cache, None, _session_id(session))
        )
        content = await within(CALL_LIMIT_S, lambda: self._ports.objects.read_log(ref))
        if isinstance(content, Missing):
            if task is None:  # its scope is not known here, and its log lies within it
                raise UnknownResource(
                    "this router does not care for the session, and it has no log outside a scope; if its client had a "
                    "key with a group, fence it at the router that cares for it"
                )
            raise UnknownResource("there is no commit log of this session; nothing can be committed to it either")
        if not isinstance(content, Content):
            raise Overloaded(f"the commit log cannot be read: {content}", retry_after_s=1)
        epoch = max((record.epoch for record, _ in read_records(content.octets)), default=1) + 1
        record = write_record(FenceRecord(epoch=epoch, by=f"{self._instance}#operator-{self._nonces.octets(8).hex()}"))
        outcome = await within(
            CALL_LIMIT_S, lambda: self._ports.objects.append(ref, record, epoch=epoch, if_match=content.tag)
        )
        if not isinstance(outcome, Appended):
            raise Overloaded(f"the fence was not acknowledged ({outcome}); try again", retry_after_s=1)
        log.warning("fenced by an operator", session=session, epoch=epoch)
        placement = None if task is None else task.placement
        return CommandDone(
            session=session,
            command="fence",
            state="not in the care of this router" if task is None else self._state_of(task),
            epoch=epoch,
            verifier=None if placement is None else placement.verifier,
            drafter=None if placement is None else placement.drafter,
        )

    def _task(self, session: str) -> SessionTask:
        task = self._sessions.get(_session_id(session))
        if task is None or task.placement.ending is not None:
            raise UnknownResource(f"session {session} is not in the care of this router, or has ended")
        return task

    def _verifier(self, uri: str, task: SessionTask) -> str:
        """The verifier that an operator named, if the session may be sent there."""
        try:
            uri = normalize_base_uri(uri)
        except ValueError as error:
            raise IllFormed(f"--to: {error}") from error
        one = self._fleet.get(uri)
        if one is None or one.role is not InstanceRole.VERIFIER:
            raise UnknownResource(f"--to: no verifier {uri} reports to this router; `sdcpctl instances` lists them")
        if not self._fleet.alive(uri, self._ports.clock.now()):
            raise Conflict(f"--to: the status of {uri} has expired; name one that is alive")
        if one.status.model != task.placement.plan.contract.target:
            raise Conflict(f"--to: {uri} runs another model than the session's contract names")
        return uri

    def _done(self, command: str, task: SessionTask, session: str) -> CommandDone:
        placement = task.placement
        log.info("operator command", command=command, session=session, epoch=placement.epoch)
        return CommandDone(
            session=session,
            command=command,
            state=self._state_of(task),
            epoch=placement.epoch,
            verifier=placement.verifier,
            drafter=placement.drafter,
        )


def _session_id(session: str) -> bytes:
    try:
        return session_from_path_id(session)
    except ValueError as error:
        raise IllFormed(f"session: {error}") from error
