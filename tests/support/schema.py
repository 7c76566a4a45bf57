"""The project's CDDL (sdcpd/protocol/sdcp.cddl) as an independent judge of octets, through pycddl."""

import re
from functools import lru_cache
from importlib.resources import files

import pycddl
from msgspec import Struct

from sdcpd.edge import cache_messages
from sdcpd.protocol import commit_log, directory, messages

PRODUCTIONS: dict[type[Struct], str] = {
    messages.Contract: "contract",
    messages.ContractSampling: "contract-sampling",
    messages.Sampling: "sampling",
    messages.Resume: "resume",
    messages.SessionOpen: "session-open",
    messages.SessionState: "session-state",
    messages.Assignment: "assignment",
    messages.InlineRow: "inline-row",
    messages.Proposal: "proposal",
    messages.Verdict: "verdict",
    messages.SpeculationStats: "stats",
    messages.Output: "output",
    messages.Status: "status",
    messages.Event: "event",
    messages.Policy: "policy",
    commit_log.Control: "control",
    commit_log.CommitRecord: "commit-record",
    commit_log.FenceRecord: "fence-record",
    commit_log.EndRecord: "end-record",
    directory.DirectoryRecord: "directory-record",
    cache_messages.LeaseRequest: "lease-request",
    cache_messages.LeaseRenewal: "lease-renewal",
    cache_messages.LeaseAnswer: "lease-answer",
    cache_messages.LookupRequest: "lookup-request",
    cache_messages.LookupAnswer: "lookup-answer",
    cache_messages.BatchRequest: "batch-request",
    cache_messages.BatchItem: "batch-item",
    cache_messages.BatchAnswer: "batch-answer",
    cache_messages.BatchResult: "batch-result",
    cache_messages.CacheStats: "cache-stats",
    cache_messages.ObjectFigures: "object-figures",
    cache_messages.TierFigures: "tier-figures",
    cache_messages.PurgeAnswer: "purge-answer",
    cache_messages.DirectoryAnswer: "directory-answer",
    cache_messages.DirectoryEntry: "directory-entry",
}
"""Every Struct that goes over a wire or into a log, and its production."""

_UNKNOWN = re.compile(r",\s*unknown\s*\}")


def text() -> str:
    return files("sdcpd.protocol").joinpath("sdcp.cddl").read_text("utf-8")


@lru_cache(maxsize=64)
def _schema(production: str, closed: bool) -> pycddl.Schema:
    rules = text()
    if closed:
        rules, count = _UNKNOWN.subn("}", re.sub(";.*", "", rules))
        assert count > 10
    return pycddl.Schema(f"root = {production}\n{rules}")


def complaint(octets: bytes, production: str, *, closed: bool = False) -> str | None:
    """What pycddl says against `octets`, None if nothing. `closed`: a key that the file does not list is refused."""
    try:
        _schema(production, closed).validate_cbor(octets)
    except pycddl.ValidationError as error:
        return str(error)
    return None
