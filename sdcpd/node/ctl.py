"""`sdcpctl`: what a node on this machine is doing, asked over its admin socket. Starts without torch.

    sdcpctl sessions            sessions that the node's roles know of
    sdcpctl show ID             one session as each role sees it; ID may be shortened while unambiguous, and begin
                                with a dash, as every 64th does
    sdcpctl instances           instances the router knows of, with their reported load
    sdcpctl failover ID         take a session from its verifier, to another one or (--to URI) to that one
    sdcpctl switch ID           have another drafter named for a session
    sdcpctl cancel ID           end a session, for its client too
    sdcpctl fence ID            write a fence into a session's log: its verifier can commit nothing more
    sdcpctl certs ...           make and show certificates: certs_command.py, which asks no daemon
    sdcpctl model ...           inspect a model's folder, make one of a GGUF file: model_command.py, neither does it

The last four are answered once they are under way, where the router runs; they are the same steps that the router takes
when a verifier's status expires, a drafter is to be replaced or a client leaves.

`--json` prints the node's answer as it is. Exit codes: 0 done, 1 not found, ambiguous or refused, 2 wrong usage, 3 the
daemon cannot be reached, 4 a certificate has expired or soon does.
"""

import argparse
import http.client
import json
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from sdcpd import __version__
from sdcpd.node.certs_command import add_certs, run_certs
from sdcpd.node.model_command import add_model, run_model

DEFAULT_SOCKET: Final = "/run/sdcpd/sdcpd.sock"
ANSWER_TIMEOUT_S: Final = 10
"""Answers are read from memory; a node that needs longer hangs."""

FILE_WIDTH: Final = 400

OK, NOT_FOUND, USAGE, UNREACHABLE = 0, 1, 2, 3

DASHED_ID: Final = re.compile(r"-[A-Za-z0-9_-]+")
COMMANDS: Final = ("failover", "switch", "cancel", "fence")
WITH_ID: Final = ("show", *COMMANDS)
SHOW_OPTIONS: Final = ("--json", "--socket", "--to", "--help")


class NodeUnreachable(Exception):
    """Nobody answers on the socket. The text says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (argparse itself exits with 2)."""
    options = parser().parse_args(_ids_last(sys.argv[1:] if arguments is None else arguments))
    if options.command == "certs":
        return run_certs(options)
    if options.command == "model":
        return run_model(options)
    method, resource = "GET", f"/{options.command}"
    if options.command in WITH_ID:
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
        _RENDER[options.command](_console(), answer)
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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(path: str, resource: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    """One request over the socket at `path`: status and JSON body. Raises NodeUnreachable."""
    connection = _UnixConnection(path)
    try:
        connection.request(method, resource)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except PermissionError as error:
        raise NodeUnreachable(
            f"{path} belongs to another user. Run sdcpctl as the user that runs sdcpd, or as root."
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NodeUnreachable(
            f"no sdcpd answers on {path} ({error}). Is it running? Its socket is sdcpd.sock in node.runtime_dir; "
            "name another one with --socket PATH."
        ) from error
    finally:
        connection.close()


def _console() -> Console:
    """The terminal's width; elsewhere wide enough that nothing is cut which a script may look for."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)


def _sessions(console: Console, answer: dict[str, Any]) -> None:
    """One line a session; `tokens` are those committed, of those allowed."""
    rows = answer["sessions"]
    table = _table("session", "state", "round", "tokens", "m_cap", "drafter", "age_s")
    for entry in rows:
        tokens = f"{_text(_first(entry, 'committed_tokens'))}/{_text(_first(entry, 'max_new'))}"
        cells = (_text(_first(entry, name)) for name in ("m_cap", "drafter", "age_s"))
        table.add_row(entry["session"], _text(_first(entry, "state")), _text(_first(entry, "round")), tokens, *cells)
    _print_or(console, table, rows, "no sessions")


def _show(console: Console, answer: dict[str, Any]) -> None:
    """Members down, roles across."""
    roles = _roles(answer)
    table = _table(answer["session"], *roles)
    names = dict.fromkeys(name for role in roles for name in answer[role])
    for name in names:
        table.add_row(name, *(_text(answer[role].get(name)) for role in roles))
    console.print(table)


def _instances(console: Console, answer: dict[str, Any]) -> None:
    """One line an instance; `age_ms` is that of its last report, which holds for `ttl_ms`."""
    rows = answer["instances"]
    names = ("instance", "role", "method", "load", "queue", "placed", "accept_milli", "age_ms", "ttl_ms", "expired")
    table = _table(*names)
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in names))
    _print_or(console, table, rows, "no instances (the router runs on another node, or nothing has reported yet)")


def _classes(console: Console, answer: dict[str, Any]) -> None:
    """One line a class. `ratio`: time per token without speculation over that with it; above 1 it pays."""
    rows = answer["classes"]
    table = _table(
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
        cells = (_text(row.get(name)) for name in names)
        table.add_row(row["name"], state, _text(row.get("reason")), _text(row.get("running")), *cells)
    _print_or(console, table, rows, "no traffic classes (no [[class]] is configured, or the router runs elsewhere)")


def _command(console: Console, answer: dict[str, Any]) -> None:
    """One line: what was begun, and where the session stood."""
    names = ("session", "command", "state", "epoch", "verifier", "drafter")
    table = _table(*names)
    table.add_row(*(_text(answer.get(name)) for name in names))
    console.print(table)


_RENDER: Final = {"sessions": _sessions, "show": _show, "instances": _instances, "classes": _classes} | dict.fromkeys(
    COMMANDS, _command
)


def _roles(entry: dict[str, Any]) -> list[str]:
    return [key for key, value in entry.items() if isinstance(value, dict)]


def _first(entry: dict[str, Any], name: str) -> object:
    """The member `name` from the verifier's entry if it has one (it owns the truth), else from any other role's."""
    roles = sorted(_roles(entry), key=lambda role: role != "verifier")
    return next((entry[role][name] for role in roles if entry[role].get(name) is not None), None)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _print_or(console: Console, table: Table, rows: Iterable[object], nothing: str) -> None:
    if rows:
        console.print(table)
    else:
        console.print(nothing)


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.3g}"
        case list() | dict():
            return json.dumps(value)
        case _:
            return str(value)


if __name__ == "__main__":
    sys.exit(main())
