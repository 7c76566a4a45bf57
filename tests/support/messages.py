"""Builders of protocol messages with valid defaults; a test names only what it is about."""

from typing import Any

from sdcpd.protocol import digests
from sdcpd.protocol.messages import Assignment, Contract, Proposal, SessionOpen, Status
from sdcpd.protocol.terms import LadderAction

SESSION = bytes(range(16))
TARGET = b"\x01" * 32
TOKENIZER = b"\x02" * 32
VERIFIER = "https://v.example/verifier/"
DRAFTER = "https://d.example/drafter/"
OTHER_DRAFTER = "https://e.example/drafter/"
ROUTER = "https://r.example/router/"
CACHE = "https://c.example/cache/"
LOG = f"{CACHE}v1/s/-/l/AAECAwQFBgcICQoLDA0ODw"


def contract(**changes: Any) -> Contract:
    values: dict[str, Any] = {
        "target": TARGET,
        "tokenizer": TOKENIZER,
        "rule": 1,
        "m_max": 8,
        "max_new": 32,
        "stop": (2,),
        "low_rounds": 2,
        "fallback": (LadderAction.REDUCE, LadderAction.SWITCH, LadderAction.FAIL),
    }
    return Contract(**(values | changes))


def session_open(**changes: Any) -> SessionOpen:
    values: dict[str, Any] = {
        "session": SESSION,
        "epoch": 1,
        "contract": contract(),
        "prompt": (1, 1, 1),
        "commit_log": LOG,
        "router": ROUTER,
    }
    return SessionOpen(**(values | changes))


def assignment(**changes: Any) -> Assignment:
    values: dict[str, Any] = {
        "session": SESSION,
        "epoch": 1,
        "contract": contract(),
        "verifier": VERIFIER,
        "drafter": DRAFTER,
        "prompt": (1, 1, 1),
        "round": 0,
        "committed": 0,
        "digest": first_digest(),
        "m_init": 8,
    }
    return Assignment(**(values | changes))


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {"instance": DRAFTER, "role": 1, "load": 0, "queue": 0, "ttl_ms": 3000}
    return Status(**(values | changes))


def proposal(tokens: tuple[int, ...], **changes: Any) -> Proposal:
    values: dict[str, Any] = {
        "session": SESSION,
        "epoch": 1,
        "round": 1,
        "drafter": DRAFTER,
        "base": 0,
        "base_digest": first_digest(),
        "tokens": tokens,
        "status": status(),
    }
    return Proposal(**(values | changes))


def first_digest(of: Contract | None = None, prompt: tuple[int, ...] = (1, 1, 1)) -> bytes:
    return digests.prompt_digest(digests.contract_digest(of if of is not None else contract()), prompt)
