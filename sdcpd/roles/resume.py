"""What a verifier reads before it takes a session over: the committed tokens and the log itself (draft 6.9; 91).

Nothing of the session is made before both agree with what the router says, so a resume that is refused leaves what was
there: a session of a lower epoch that still runs here, say.
"""

from msgspec import UNSET

from sdcpd.protocol.encoding import decode_tokens
from sdcpd.protocol.messages import SessionOpen
from sdcpd.protocol.problems import Conflict, Overloaded
from sdcpd.protocol.takeover import Takeover, take_over
from sdcpd.roles.ports import Content, Missing, Objects, StoreRefused, Unreachable
from sdcpd.roles.waits import within

READ_LIMIT_S = 10.0
"""One read; the router repeats an open that it was put off with."""


async def read_takeover(message: SessionOpen, prompt: tuple[int, ...], vocabulary: int, objects: Objects) -> Takeover:
    """Fetch and check. Raises StaleEpoch or Conflict (fence anew), Overloaded (come again), IllFormed."""
    resume = message.resume
    assert resume is not UNSET
    fetched = await within(READ_LIMIT_S, lambda: objects.fetch(resume.committed_tokens))
    tokens = decode_tokens(_octets(fetched, "committed_tokens"))
    if max(tokens, default=0) >= vocabulary:
        raise Conflict(f"committed_tokens: token {max(tokens)} is outside the vocabulary of {vocabulary}")
    log = await within(READ_LIMIT_S, lambda: objects.read_log(message.commit_log))
    return take_over(message, prompt, tokens, _octets(log, "commit_log"))


def _octets(outcome: Content | Missing | StoreRefused | Unreachable, what: str) -> bytes:
    match outcome:
        case Content(octets=octets):
            return octets
        case Missing():
            raise Conflict(f"{what}: there is no such object")
        case StoreRefused(status=status, detail=detail) if status < 500:
            raise Conflict(f"{what}: the store refuses it: {detail}")
        case StoreRefused(detail=detail) | Unreachable(reason=detail):
            raise Overloaded(f"{what}: it could not be read: {detail}", retry_after_s=1)
