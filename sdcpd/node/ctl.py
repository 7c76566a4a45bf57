"""`sdcpctl`: what a node on this machine is doing, asked over its admin socket. Starts without torch.

    sdcpctl sessions            sessions that the node's roles know of
    sdcpctl show ID             one session as each role sees it; ID may be shortened while unambiguous, and begin
                                with a dash, as every 64th does
    sdcpctl instances           instances the router knows of, with their reported load
    sdcpctl failover ID         take a session from its verifier, to another one or (--to URI) to that one
    sdcpctl switch ID           have another drafter named for a session
    sdcpctl cancel ID           end a session, for its client too
    sdcpctl fence ID            write a fence into a session's log: its verifier can commit nothing more
    sdcpctl cache ...           what the node's cache holds, and what is to stay or go of it: ctl_cache.py
    sdcpctl certs ...           make and show certificates: certs_command.py, which asks no daemon
    sdcpctl model ...           inspect a model's folder, make one of a GGUF file: model_command.py, neither does it

What is done to a session is answered once it is under way, where the router runs: the same steps that the router takes
when a verifier's status expires, a drafter is to be replaced or a client leaves.

`--json` prints the node's answer as it is. Exit codes: 0 done, 1 not found, ambiguous or refused, 2 wrong usage, 3 the
daemon cannot be reached, 4 a certificate has expired or soon does.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console

from sdcpd import __version__
from sdcpd.node.certs_command import add_certs, run_certs
from sdcpd.node.ctl_cache import CACHE_RENDER, add_cache, cache_resource
from sdcpd.node.ctl_socket import NodeUnreachable, ask
from sdcpd.node.ctl_tables import console, print_or, table_of, text_of
from sdcpd.node.model_command import add_model, run_model

DEFAULT_SOCKET: Final = "/run/sdcpd/sdcpd.sock"
OK, NOT_FOUND, USAGE, UNREACHABLE = 0, 1, 2, 3

DASHED_ID: Final = re.compile(r"-[A-Za-z0-9_-]+")
COMMANDS: Final = ("failover", "switch", "cancel", "fence")
WITH_ID: Final = ("show", *COMMANDS)
SHOW_OPTIONS: Final = ("--json", "--socket", "--to", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (argparse itself exits with 2)."""
    options = parser().parse_args(_ids_last(sys.argv[1:] if arguments is None else arguments))
    if options.command == "certs":
        return run_certs(options)
    if options.command == "model":
        return run_model(options)
    method, resource = "GET", f"/{options.command}"
    if options.command == "cache":
        method, resource = cache_resource(options)
    elif options.command in WITH_ID:
        if not options.id:
            print("sdcpctl: the session ID is empty; `sdcpctl sessions` lists those there are", file=sys.stderr)
            return USAGE
        resource = f"/sessions/{quote(options.id, safe='', errors='surrogateescape')}"
    if options.command in COMMANDS:
        method, resource = "POST", f"{resource}/{options.command}"
        to = getattr(options, "to", None)
        resource += f"?to={quote(to, safe='', errors='surrogateescape')}" if to is not None else ""
    try:
        status, answer = ask(options.socket, resource, method)
    except NodeUnreachable as error:
        print(f"sdcpctl: {error}", file=sys.stderr)
        return UNREACHABLE
    if status != 200:
        print(f"sdcpctl: {answer.get('detail', status)}", file=sys.stderr)
        for session in answer.get("sessions", []):
            print(f"  {session}", file=sys.stderr)
        return NOT_FOUND
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        render = CACHE_RENDER[options.cache_command] if options.command == "cache" else _RENDER[options.command]
        render(console(), answer)
    return OK


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print the node's answer as JSON")
    shared.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help="admin socket (default %(default)s)")
    result = argparse.ArgumentParser(
        prog="sdcpctl",
        description="Ask an sdcpd node on this machine what it is doing.",
        epilog="exit codes: 0 done, 1 not found, ambiguous or refused, 2 wrong usage, 3 daemon not reachable, "
        "4 a certificate has expired or soon does",
    )
    result.add_argument("--version", action="version", version=f"sdcpctl {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("sessions", parents=[shared], help="sessions that the node's roles know of")
    show = commands.add_parser("show", parents=[shared], help="one session as each role sees it")
    show.add_argument("id", metavar="ID", help="session id, or an unambiguous beginning of it")
    commands.add_parser("instances", parents=[shared], help="instances the router knows of")
    commands.add_parser("classes", parents=[shared], help="traffic classes: whether they speculate, and what it gains")
    _add_commands(commands, shared)
    add_cache(commands, shared)
    add_certs(commands)
    add_model(commands)
    return result


def _add_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", shared: argparse.ArgumentParser
) -> None:
    """What is done to a session, besides looking at it."""
    helps = {
        "failover": "take a session from its verifier to another one",
        "switch": "have another drafter named for a session",
        "cancel": "end a session",
        "fence": "fence a session's commit log",
    }
    for name in COMMANDS:
        command = commands.add_parser(name, parents=[shared], help=helps[name])
        command.add_argument("id", metavar="ID", help="session id, or an unambiguous beginning of it")
        if name == "failover":
            command.add_argument("--to", metavar="URI", help="base URI of the verifier that is to go on with it")


def _ids_last(arguments: Sequence[str]) -> list[str]:
    """Arguments with an ID that begins with a dash moved behind `--`, where argparse takes it for no option.

    Options, also those shortened as argparse allows, stay what they are: no ID of full length looks like one.
    """
    if not arguments or arguments[0] not in WITH_ID or "--" in arguments:
        return list(arguments)
    rest = arguments[1:]
    dashed = [each for each in rest if DASHED_ID.fullmatch(each) and not _is_option(each)]
    if not dashed:
        return list(arguments)
    return [arguments[0], *(each for each in rest if each not in dashed), "--", *dashed]


def _is_option(argument: str) -> bool:
    return argument == "-h" or any(option.startswith(argument) for option in SHOW_OPTIONS)


def _sessions(out: Console, answer: dict[str, Any]) -> None:
    """One line a session; `tokens` are those committed, of those allowed."""
    rows = answer["sessions"]
    table = table_of("session", "state", "round", "tokens", "m_cap", "drafter", "age_s")
    for entry in rows:
        tokens = f"{text_of(_first(entry, 'committed_tokens'))}/{text_of(_first(entry, 'max_new'))}"
        cells = (text_of(_first(entry, name)) for name in ("m_cap", "drafter", "age_s"))
        table.add_row(
            entry["session"], text_of(_first(entry, "state")), text_of(_first(entry, "round")), tokens, *cells
        )
    print_or(out, table, rows, "no sessions")


def _show(out: Console, answer: dict[str, Any]) -> None:
    """Members down, roles across."""
    roles = _roles(answer)
    table = table_of(answer["session"], *roles)
    names = dict.fromkeys(name for role in roles for name in answer[role])
    for name in names:
        table.add_row(name, *(text_of(answer[role].get(name)) for role in roles))
    out.print(table)


def _instances(out: Console, answer: dict[str, Any]) -> None:
    """One line an instance; `age_ms` is that of its last report, which holds for `ttl_ms`."""
    rows = answer["instances"]
    names = ("instance", "role", "method", "load", "queue", "placed", "accept_milli", "age_ms", "ttl_ms", "expired")
    table = table_of(*names)
    for row in rows:
        table.add_row(*(text_of(row.get(name)) for name in names))
    print_or(out, table, rows, "no instances (the router runs on another node, or nothing has reported yet)")


def _classes(out: Console, answer: dict[str, Any]) -> None:
    """One line a class. `ratio`: time per token without speculation over that with it; above 1 it pays."""
    rows = answer["classes"]
    table = table_of(
        "class", "speculation", "reason", "running", "acceptance", "sessions", "ms/token", "plain", "ms/token", "ratio"
    )
    for row in rows:
        names = (
            "acceptance",
            "with_sessions",
            "with_ms_per_token",
            "without_sessions",
            "without_ms_per_token",
            "ratio",
        )
        state = "on" if row["speculation"] else "off"
        cells = (text_of(row.get(name)) for name in names)
        table.add_row(row["name"], state, text_of(row.get("reason")), text_of(row.get("running")), *cells)
    print_or(out, table, rows, "no traffic classes (no [[class]] is configured, or the router runs elsewhere)")


def _command(out: Console, answer: dict[str, Any]) -> None:
    """One line: what was begun, and where the session stood."""
    names = ("session", "command", "state", "epoch", "verifier", "drafter")
    table = table_of(*names)
    table.add_row(*(text_of(answer.get(name)) for name in names))
    out.print(table)


_RENDER: Final = {"sessions": _sessions, "show": _show, "instances": _instances, "classes": _classes} | dict.fromkeys(
    COMMANDS, _command
)


def _roles(entry: dict[str, Any]) -> list[str]:
    return [key for key, value in entry.items() if isinstance(value, dict)]


def _first(entry: dict[str, Any], name: str) -> object:
    """The member `name` from the verifier's entry if it has one (it owns the truth), else from any other role's."""
    roles = sorted(_roles(entry), key=lambda role: role != "verifier")
    return next((entry[role][name] for role in roles if entry[role].get(name) is not None), None)


if __name__ == "__main__":
    sys.exit(main())
